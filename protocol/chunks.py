"""Chunks of streamed answers, for /openapi.json alone: the server writes them without these classes."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from protocol.chat import ChoiceLogprobs
from protocol.common import CompletionTokensDetails, PromptTokensDetails
from protocol.completions import CompletionLogprobs
from protocol.messages import AnswerBlock, MessageUsage, StopReason, WholeMessage
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
    """New parts of a function's call."""

    name: str | None = None
    """Name of the tool, in the first piece of a call."""
    arguments: str | None = None
    """Text that continues the arguments."""


class ToolCallDelta(BaseModel):
    """New parts of a call."""

    index: int
    """Place among the calls."""
    id: str | None = None
    """Id of the call, in its first piece."""
    type: Literal["function"] | None = None
    """Kind of the tool, in its first piece."""
    function: FunctionDelta
    """Name, then arguments."""


class ChatDelta(BaseModel):
    """New parts of a choice. The first has the role, the last is empty."""

    role: Literal["assistant"] | None = None
    """Role of the author."""
    content: str | None = None
    """Text that continues the text before."""
    reasoning_content: str | None = None
    """Reasoning that continues the reasoning before."""
    tool_calls: list[ToolCallDelta] | None = None
    """New parts of calls."""
    function_call: FunctionDelta | None = None
    """New parts of the call, if the request has `functions`."""


class ChunkChoice(BaseModel):
    """New parts of a choice."""

    index: int
    """Place among the choices."""
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None
    """Reason why the choice has ended, in its last chunk; null before."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it, an extension."""
    token_ids: list[int] | None = None
    """New token ids, with `return_token_ids`."""


class ChatChunkChoice(ChunkChoice):
    """New parts of a choice of a chat."""

    delta: ChatDelta
    """The new text."""
    logprobs: ChoiceLogprobs | None
    """Log-probabilities of the new tokens; null unless the request asks for them."""


class ChatCompletionChunk(AnyChunk):
    """One event of a streamed answer to a chat."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    """Kind of this object."""
    choices: list[ChatChunkChoice]
    """One choice, or none in the chunk with the usage of the whole request."""


class CompletionChunkChoice(ChunkChoice):
    """New parts of a choice of a completion."""

    text: str
    """Text that continues the text before."""
    logprobs: CompletionLogprobs | None
    """Log-probabilities of the new tokens; null unless the request asks for them."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt, with `return_token_ids`, in the first chunk."""


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
    """The response so far: in `response.created`, `.in_progress`, `.completed`, `.incomplete` and `.failed`."""
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
    """The new text."""
    text: str | None = None
    """The whole text, at its end."""
    arguments: str | None = None
    """The whole arguments of a call, at their end."""
    input: str | None = None
    """The whole input of a custom tool, at its end."""
    logprobs: list[dict[str, Any]] | None = None
    """Log-probabilities of the tokens of `delta` or `text`."""


class MessageStart(BaseModel):
    """The answer begins."""

    type: Literal["message_start"]
    """Kind of this event."""
    message: WholeMessage
    """The answer, without content; `usage` has the prompt's tokens."""


class BlockStart(BaseModel):
    """A block begins."""

    type: Literal["content_block_start"]
    """Kind of this event."""
    index: int
    """Place of the block."""
    content_block: AnswerBlock
    """The block, without its text or input."""


class TextDelta(BaseModel):
    """Text."""

    type: Literal["text_delta"]
    """Kind of this delta."""
    text: str
    """Text that continues the block's."""


class ThinkingDelta(BaseModel):
    """Reasoning."""

    type: Literal["thinking_delta"]
    """Kind of this delta."""
    thinking: str
    """Text that continues the block's."""


class SignatureDelta(BaseModel):
    """The signature of a block of reasoning, at its end."""

    type: Literal["signature_delta"]
    """Kind of this delta."""
    signature: str
    """The signature."""


class InputDelta(BaseModel):
    """A call's input."""

    type: Literal["input_json_delta"]
    """Kind of this delta."""
    partial_json: str
    """Text that continues the input's JSON."""


class BlockDelta(BaseModel):
    """A block goes on."""

    type: Literal["content_block_delta"]
    """Kind of this event."""
    index: int
    """Place of the block."""
    delta: Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")]
    """The new content."""


class BlockStop(BaseModel):
    """A block has ended."""

    type: Literal["content_block_stop"]
    """Kind of this event."""
    index: int
    """Place of the block."""


class StopDelta(BaseModel):
    """Reason why the answer has ended."""

    stop_reason: StopReason
    """Reason why the answer has ended."""
    stop_sequence: str | None
    """The stop sequence that ended it."""
    stop_details: None = None
    """Always null."""


class MessageDelta(BaseModel):
    """The answer has ended."""

    type: Literal["message_delta"]
    """Kind of this event."""
    delta: StopDelta
    """The reason."""
    usage: MessageUsage
    """Numbers of tokens of the whole answer."""


class MessageStop(BaseModel):
    """The stream has ended."""

    type: Literal["message_stop"]
    """Kind of this event."""


class Ping(BaseModel):
    """Nothing has come for a while."""

    type: Literal["ping"]
    """Kind of this event."""


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a streamed message."""
