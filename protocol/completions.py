"""POST /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from protocol.common import MAX_PROMPTS, GenerationFields, Int32, TokenIds, Usage


class CompletionRequest(GenerationFields):
    """OpenAI's request, with the extensions of GenerationFields. `prompt` is text or token ids, one or several."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Int32 | None = None

    suffix: Any = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer when `stream` is false; with it, chunks of the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
