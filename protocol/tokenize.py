"""POST /tokenize and /detokenize, in vLLM's shape."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from protocol.chat import ChatMessage
from protocol.common import MAX_MESSAGES, TokenIds, Wire


class TokenizeRequest(Wire):
    """Either `prompt`, or `messages`, rendered by the chat template first."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str
