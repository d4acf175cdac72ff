"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from protocol.common import MAX_MESSAGES, Finite, Int32, LongUrl, ModelFields, Strings, Wire


class TextBlock(Wire):
    """A block of text."""

    type: str
    """Always `text`. Example: "text" """
    text: str
    """The text. Example: "Hello" """
    cache_control: Any = None
    """Accepted and ignored: equal prefixes are found without it. Example: {"type": "ephemeral"}"""
    citations: Any = None
    """Accepted and ignored: what a former answer cited. Example: null"""


class BlockSource(Wire):
    """Location of an image or a document."""

    type: str
    """`base64` or `url` for an image, `text` or `content` for a document. Example: "url" """
    media_type: str | None = None
    """Media type of `data`: image/jpeg, image/png, image/gif or image/webp; text/plain. Example: "image/png" """
    data: LongUrl | None = None
    """The image in base64, or the document's text. Example: "iVBORw0KGgo=" """
    url: LongUrl | None = None
    """http(s), a data URL, or a file of the server's folder of media. Example: "https://example.com/image.png" """
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """The document's text, or text blocks. Example: "A text." """

    # Refused by name (`routers/messages.py`).
    file_id: Any = None
    """Not supported."""


class InnerBlock(Wire):
    """A block inside the result of a tool."""

    type: str
    """`text`, `image`, `document` or `tool_reference`. Example: "text" """
    text: str | None = None
    """The text. Example: "Hello" """
    source: BlockSource | None = None
    """The image or document. Example: {"type": "url", "url": "https://example.com/image.png"}"""
    title: str | None = None
    """Title of a document, which the model sees. Example: "Report" """
    context: str | None = None
    """Additional information about a document for the model. Example: "Of last year." """
    citations: Any = None
    """Refused where it asks for citations. Example: {"enabled": false}"""
    tool_name: str | None = None
    """The tool that a `tool_reference` found. Example: "get_weather" """
    cache_control: Any = None
    """Accepted and ignored: equal prefixes are found without it. Example: {"type": "ephemeral"}"""


class ChangedTool(Wire):
    """A tool of the request, by name."""

    type: str
    """Always `tool_reference`. Example: "tool_reference" """
    name: str | None = None
    """Its name. Example: "get_weather" """


class ContentBlock(InnerBlock):
    """A block of a message."""

    type: str
    """`text`, `image` or `document`; a user's `tool_result`; an assistant's `tool_use`, `thinking` or
    `redacted_thinking`; a system message's `tool_addition` or `tool_removal`. Example: "text" """
    id: str | None = None
    """Name of a call, to which its result refers. Example: "toolu_1" """
    name: str | None = None
    """The tool that is called. Example: "get_weather" """
    input: dict[str, Any] | None = None
    """Arguments of the call. Example: {"city": "Rome"}"""
    tool_use_id: str | None = None
    """The call whose result this is. Example: "toolu_1" """
    content: str | Annotated[list[InnerBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """A result, as text or as blocks. Default: empty. Example: "Sunny" """
    is_error: bool | None = None
    """Whether the tool failed: the model sees `Error: ` before the result. Example: false"""
    thinking: str | None = None
    """Reasoning of a former answer, for templates that show it. Example: "Let me think." """
    signature: Any = None
    """Accepted and ignored. Example: "c2ln" """
    data: Any = None
    """Data of `redacted_thinking`; accepted and ignored. Example: "b3BhcXVl" """
    tool: ChangedTool | None = None
    """The tool that is available from here on, or no longer. Example: {"type": "tool_reference", "name": "get_time"}"""
    caller: Any = None
    """Accepted and ignored. Example: {"type": "direct"}"""


class MessageParam(Wire):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    """Role of the author. Example: "user" """
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    """Content, as text or as blocks. Example: "Hello" """


class MessageTool(Wire):
    """A tool that the model may call."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.:/@-]{1,128}$")]
    """Its name. Example: "get_weather" """
    type: str | None = None
    """Null or `custom`: Anthropic's own tools are refused. Example: "custom" """
    description: str | None = None
    """Description of the tool for the model. Example: "Current weather in a city" """
    input_schema: dict[str, Any] | None = None
    """JSON schema of its input. Example: {"type": "object", "properties": {"city": {"type": "string"}}}"""
    strict: bool | None = None
    """Hold inputs to the schema by a grammar. Example: false"""
    cache_control: Any = None
    """Accepted and ignored: equal prefixes are found without it. Example: {"type": "ephemeral"}"""
    input_examples: Any = None
    """Accepted and ignored. Example: [{"city": "Rome"}]"""
    eager_input_streaming: Any = None
    """Accepted and ignored: inputs are always streamed as they come. Example: true"""
    allowed_callers: Any = None
    """Accepted and ignored: the model alone calls tools. Example: ["direct"]"""
    defer_loading: Any = None
    """Accepted and ignored: the prompt has all tools. Example: false"""


class MessageToolChoice(Wire):
    """The model's choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto`; `any`: the answer is calls; `tool`: it calls the one that is named; `none`: as without tools. What
    requires a call makes it valid by a grammar. Example: "auto" """
    name: str | None = None
    """The tool, for `tool`. Example: "get_weather" """
    disable_parallel_tool_use: bool | None = None
    """Have one call at most. Example: false"""


class Thinking(Wire):
    """Whether the model reasons."""

    type: Literal["enabled", "adaptive", "disabled"]
    """`enabled` and `adaptive` set the chat template's variable `enable_thinking` to true, `disabled` to false.
    Example: "enabled" """
    budget_tokens: Annotated[Int32, Field(ge=0)] | None = None
    """Maximum number of tokens of reasoning, whose end is then forced. Example: 1024"""
    display: str | None = None
    """`omitted` leaves reasoning out of the answer. Default: summarized, which is all of it. Example: "summarized" """


class MessageFormat(Wire):
    """A schema for the output."""

    type: str
    """Always `json_schema`. Example: "json_schema" """
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema. Example: {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}"""


class OutputConfig(Wire):
    """Options of the output."""

    effort: str | None = None
    """Handed to the chat template as `reasoning_effort`, if it has this variable. Example: "low" """
    format: MessageFormat | None = None
    """Format of the output. Example: {"type": "json_schema", "schema": {"type": "object"}}"""


class PromptFields(ModelFields):
    """Fields that define the prompt. Null means the default of a field."""

    messages: list[MessageParam] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """The conversation so far. If the last message is an assistant's, the answer continues it.
    Example: [{"role": "user", "content": "Hello"}]"""
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """The system prompt. Claude Code's billing header in it is left out, so that equal prefixes are found.
    Example: "Be brief." """
    tools: Annotated[list[MessageTool], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Tools that the model may call. Example: [{"name": "get_time", "input_schema": {"type": "object"}}]"""
    tool_choice: MessageToolChoice | None = None
    """The model's choice among the tools. Default: auto. Example: {"type": "auto"}"""
    thinking: Thinking | None = None
    """Whether the model reasons. Default: as its chat template has it. Example: {"type": "disabled"}"""
    output_config: OutputConfig | None = None
    """Effort and format of the output. Example: {"effort": "low"}"""

    # Accepted and without effect: they ask for nothing that changes the answer here.
    cache_control: Any = None
    """Accepted and ignored: equal prefixes are found without it. Example: {"type": "ephemeral"}"""
    context_management: Any = None
    """Accepted and ignored: the prompt has all of the conversation. Example: {"edits": []}"""
    speed: Any = None
    """Accepted and ignored. Example: "standard" """

    # Refused by name when they are set (`routers/fields.py`).
    mcp_servers: Any = None
    """Not supported."""
    container: Any = None
    """Not supported."""
    thread: Any = None
    """Not supported: the error's `error_code` makes SDKs send the whole conversation instead."""


class CountTokensRequest(PromptFields):
    """Anthropic's request to count the tokens of a prompt. Null means the default of a field."""


class MessagesRequest(PromptFields):
    """Anthropic's request. Null means the default of a field."""

    max_tokens: Annotated[Int32, Field(ge=1)]
    """Maximum number of tokens to generate; less is generated where the model's context ends before. Example: 64"""
    stream: bool | None = None
    """Send the answer as server-sent events while it is generated. Example: false"""
    stop_sequences: Strings | None = None
    """Texts at which the answer ends; it does not have them. Example: ["\\n\\n"]"""
    temperature: Finite | None = None
    """Randomness: logits are divided by it. 0 always takes the most likely token. Example: 0.7"""
    top_p: Finite | None = None
    """Sample from the most likely tokens whose probabilities add up to this; 1 samples from all. Example: 0.9"""
    top_k: Int32 | None = None
    """Sample from this many of the most likely tokens; 0 and -1 sample from all. Example: 40"""

    # Accepted and without effect.
    metadata: Any = None
    """Accepted and ignored. Example: {"user_id": "user-1"}"""
    service_tier: Any = None
    """Accepted and ignored. Example: "auto" """
    inference_geo: Any = None
    """Accepted and ignored. Example: "eu" """
    diagnostics: Any = None
    """Accepted and ignored. Example: {}"""
    user_profile_id: Any = None
    """Accepted and ignored. Example: "user-1" """


class ThinkingDetails(BaseModel):
    """Parts of `output_tokens`."""

    thinking_tokens: int
    """Tokens of reasoning."""


class MessageUsage(BaseModel):
    """Numbers of tokens. The prompt has `input_tokens`, `cache_read_input_tokens` and `cache_creation_input_tokens`
    together.
    """

    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int
    """Always 0: prompts are cached without being asked to."""
    cache_read_input_tokens: int
    """Tokens of the prompt whose KV blocks were cached."""
    output_tokens: int
    """Tokens generated."""
    output_tokens_details: ThinkingDetails
    """Parts of `output_tokens`."""
    server_tool_use: None = None
    """Always null."""


class WholeUsage(MessageUsage):
    """Numbers of tokens, and further fields of Anthropic's API."""

    cache_creation: None = None
    """Always null."""
    service_tier: Literal["standard"] = "standard"
    """Always the same."""
    inference_geo: None = None
    """Always null."""


class AnswerText(BaseModel):
    """Text."""

    type: Literal["text"] = "text"
    """Kind of this block."""
    text: str
    """The text."""
    citations: None = None
    """Always null."""


class AnswerThinking(BaseModel):
    """Reasoning."""

    type: Literal["thinking"] = "thinking"
    """Kind of this block."""
    thinking: str
    """The text."""
    signature: str
    """Digest of the text. Nothing checks it where the block is sent back."""


class DirectCaller(BaseModel):
    """The model itself."""

    type: Literal["direct"] = "direct"
    """Always the same."""


class AnswerToolUse(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    """Kind of this block."""
    id: str
    """Id of the call, which its result repeats."""
    name: str
    """Name of the tool."""
    input: dict[str, Any]
    """Arguments of the call."""
    caller: DirectCaller
    """Caller of the tool."""


AnswerBlock = Annotated[AnswerText | AnswerThinking | AnswerToolUse, Field(discriminator="type")]
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class WholeMessage(BaseModel):
    """The answer when `stream` is false."""

    id: str
    """Id of the answer, made of the request's."""
    type: Literal["message"] = "message"
    """Kind of this object."""
    role: Literal["assistant"] = "assistant"
    """Role of the author."""
    model: str
    """Name of the model."""
    content: list[AnswerBlock]
    """The answer, in blocks."""
    stop_reason: StopReason | None
    """Reason why the answer ended; null in `message_start`."""
    stop_sequence: str | None
    """The stop sequence that ended it."""
    stop_details: None = None
    """Always null."""
    container: None = None
    """Always null."""
    usage: WholeUsage
    """Numbers of tokens."""


class TokensCount(BaseModel):
    """The answer to count_tokens."""

    input_tokens: int
    """Tokens of the prompt."""


class MessagesError(BaseModel):
    """Kind and description of an error."""

    type: str
    """Kind of error: `invalid_request_error`, `not_found_error`, `rate_limit_error`, `overloaded_error` and so on."""
    message: str
    """Description of the error, for people; it names the field at fault."""
    details: dict[str, str] | None = None
    """`error_code`: what is wrong, for programs, as in `context_length_exceeded`; `param`: the field at fault."""


class MessagesErrorEnvelope(BaseModel):
    """The body of every answer of these routes that is not a success."""

    type: Literal["error"] = "error"
    """Kind of this object."""
    error: MessagesError
    """The error."""
    request_id: str | None
    """Id of the request, as the header `request-id` has it."""
