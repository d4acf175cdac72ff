"""POST /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from protocol.common import MAX_PROMPTS, GenerationFields, Int32, TokenIds, Usage


class CompletionRequest(GenerationFields):
    """OpenAI's request, with extensions. Null means the default of a field."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    """Text or token ids to continue, or several of either. None may be empty. Example: "Once upon a time" """
    echo: bool | None = None
    """Repeat the prompt before the output; `max_tokens` may then be 0. Example: false"""
    logprobs: Int32 | None = None
    """Return the log-probabilities of the output's tokens (with `echo`, of the prompt's as well), each with this many
    alternatives. Example: 0"""

    suffix: Any = None
    """Not supported."""


class CompletionLogprobs(BaseModel):
    """Log-probabilities: lists of equal length, with an entry for each token."""

    tokens: list[str]
    """Texts of the tokens; one that is no UTF-8 by itself reads `bytes:\\\\x…`."""
    token_logprobs: list[float | None]
    """Natural logarithms of their probabilities; null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None] | None
    """The most likely tokens in the place of each."""
    text_offset: list[int]
    """Number of whole characters of the text before each token."""


class CompletionChoice(BaseModel):
    """One continuation of a prompt."""

    index: int
    """Place among the choices: those of the first prompt come first."""
    text: str
    """The output, after the prompt if `echo` asks for it."""
    logprobs: CompletionLogprobs | None
    """Null unless the request asks for them."""
    finish_reason: Literal["stop", "length"]
    """`stop` at the end of the sequence or a stop string, `length` at `max_tokens` or the context's end."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it, an extension."""
    token_ids: list[int] | None = None
    """Token ids of the output, with `return_token_ids`."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt, with `return_token_ids`."""


class Completion(BaseModel):
    """The answer when `stream` is false."""

    id: str
    """Id of the answer, made of the request's."""
    object: Literal["text_completion"] = "text_completion"
    """Kind of this object."""
    created: int
    """Unix time in seconds."""
    model: str
    """Name of the model."""
    system_fingerprint: str
    """Changes when the server is started anew."""
    choices: list[CompletionChoice]
    """`n` for each prompt."""
    usage: Usage
    """Numbers of tokens."""
