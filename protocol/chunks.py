"""Chunks of streamed answers, for /openapi.json alone: the server writes them without these classes."""

from typing import Any, Literal

from pydantic import BaseModel

from protocol.chat import ChoiceLogprobs
from protocol.common import CompletionTokensDetails, PromptTokensDetails
from protocol.completions import CompletionLogprobs
from protocol.responses import Response


class ChunkUsage(BaseModel):
    """Numbers of tokens: of the whole request or, with `continuous_usage_stats`, of the chunk's choice so far."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens generated."""
    total_tokens: int
    """The sum of both."""
    prompt_tokens_details: PromptTokensDetails | None = None
    """Sent for the whole request only."""
    completion_tokens_details: CompletionTokensDetails | None = None
    """Sent for the whole request only."""


class AnyChunk(BaseModel):
    """Fields that chunks of all answers share."""

    id: str
    """Id of the answer, the same in all its chunks."""
    created: int
    """Unix time in seconds."""
    model: str
    """Name of the model."""
    system_fingerprint: str
    """Changes when the server is started anew."""
    usage: ChunkUsage | None = None
    """There only if `stream_options` ask for it."""


class FunctionDelta(BaseModel):
    """What is new in a function's call."""

    name: str | None = None
    """Name of the tool, in the first piece of a call."""
    arguments: str | None = None
    """Text that continues the arguments."""


class ToolCallDelta(BaseModel):
    """What is new in a call."""

    index: int
    """Place among the calls."""
    id: str | None = None
    """Id of the call, in its first piece."""
    type: Literal["function"] | None = None
    """Kind of the tool, in its first piece."""
    function: FunctionDelta
    """Name, then arguments."""


class ChatDelta(BaseModel):
    """What is new in a choice. The first has the role, the last is empty."""

    role: Literal["assistant"] | None = None
    """Role of the author."""
    content: str | None = None
    """Text that continues the text before."""
    reasoning_content: str | None = None
    """Reasoning that continues the reasoning before."""
    tool_calls: list[ToolCallDelta] | None = None
    """What is new in calls."""
    function_call: FunctionDelta | None = None
    """What is new in the call, if the request has `functions`."""


class ChunkChoice(BaseModel):
    """What is new in a choice."""

    index: int
    """Place among the choices."""
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None
    """Why the choice has ended, in its last chunk; null before."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it, an extension."""
    token_ids: list[int] | None = None
    """With `return_token_ids`, the new tokens."""


class ChatChunkChoice(ChunkChoice):
    """What is new in a choice."""

    delta: ChatDelta
    """The new text."""
    logprobs: ChoiceLogprobs | None
    """Of the new tokens; null unless the request asks for them."""


class ChatCompletionChunk(AnyChunk):
    """One event of a streamed answer to a chat."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    """Kind of this object."""
    choices: list[ChatChunkChoice]
    """One choice, or none in the chunk with the usage of the whole request."""


class CompletionChunkChoice(ChunkChoice):
    """What is new in a choice."""

    text: str
    """Text that continues the text before."""
    logprobs: CompletionLogprobs | None
    """Of the new tokens; null unless the request asks for them."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`, the prompt, in the first chunk."""


class CompletionChunk(AnyChunk):
    """One event of a streamed completion."""

    object: Literal["text_completion"] = "text_completion"
    """Kind of this object."""
    choices: list[CompletionChunkChoice]
    """One choice, or none in the chunk with the usage of the whole request."""


class ResponseEvent(BaseModel):
    """One event of a streamed response; the line `event:` repeats its type."""

    type: str
    """OpenAI's name of the event, such as `response.output_text.delta`."""
    sequence_number: int
    """Number of the event in its stream, from 0."""
    response: Response | None = None
    """The response as far as it has come: in `response.created`, `.in_progress`, `.completed`, `.incomplete`, `.failed`."""
    item: dict[str, Any] | None = None
    """The item that begins or ends."""
    part: dict[str, Any] | None = None
    """The part of an item's content that begins or ends."""
    item_id: str | None = None
    """The item that goes on."""
    output_index: int | None = None
    """Place of the item in the response's `output`."""
    content_index: int | None = None
    """Place of the part in the item's content."""
    delta: str | None = None
    """What is new."""
    text: str | None = None
    """The whole text, at its end."""
    arguments: str | None = None
    """The whole arguments of a call, at their end."""
    input: str | None = None
    """The whole input of a custom tool, at its end."""
    logprobs: list[dict[str, Any]] | None = None
    """Log-probabilities of the tokens of `delta` or `text`."""
