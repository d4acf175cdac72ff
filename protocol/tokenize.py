"""POST /tokenize and /detokenize, in vLLM's shape."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from protocol.chat import ChatMessage, FunctionTool, MediaOptions, VideoSampling
from protocol.common import MAX_MESSAGES, TokenIds, Wire


class TokenizeRequest(Wire):
    """Either `prompt`, or `messages`, rendered by the chat template first."""

    model: str | None = None
    """Name of the served model; may be left out."""
    prompt: str | None = None
    """Text to tokenise. Example: "Once upon a time" """
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Chat to render and tokenise. Example: [{"role": "user", "content": "Hello"}]"""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens. Default: true for `prompt`, false for `messages`. Example: true"""
    add_generation_prompt: bool | None = None
    """End a chat with what begins the assistant's answer. Default: true, unless `continue_final_message` is set.
    Example: true"""
    continue_final_message: bool | None = None
    """End a chat where its last message ends. Example: false"""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Tools of the chat. Example: [{"type": "function", "function": {"name": "get_time"}}]"""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template that the server's settings let requests set. Example: {}"""
    media_io_kwargs: MediaOptions | None = None
    """The frames to take of a chat's videos. Example: {"video": {"num_frames": 8}}"""
    mm_processor_kwargs: VideoSampling | None = None
    """The same, under another name of vLLM's. Example: {"fps": 2}"""
    return_token_strs: bool | None = None
    """Return the text of each token as well. Example: true"""


class TokenizeResponse(BaseModel):
    """Token ids."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """The model's context length in tokens."""
    tokens: list[int]
    """The token ids."""
    token_strs: list[str] | None = None
    """Text of each token by itself, with `return_token_strs`."""


class DetokenizeRequest(Wire):
    """Token ids to turn into text."""

    model: str | None = None
    """Name of the served model; may be left out."""
    tokens: TokenIds
    """The token ids, all below the size of the vocabulary. Example: [50, 51, 52]"""


class DetokenizeResponse(BaseModel):
    """Text."""

    prompt: str
    """The text, special tokens included."""
