"""POST /v1/responses and the routes beside it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from protocol.common import MAX_MESSAGES, InputAudio, Int32, Int64, LongUrl, ModelFields, SamplingFields, Wire

Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
ShortText = Annotated[str, Field(max_length=512)]


class InputPart(Wire):
    """One part of an item's content."""

    type: str
    """`input_text`, `output_text`, `summary_text`, `reasoning_text` or `text`, `refusal`, `input_image` or
    `input_audio`: the field that has the content. Example: "input_text" """
    text: str | None = None
    """The text. Example: "Hello" """
    refusal: str | None = None
    """Text with which an assistant refused. Example: "No." """
    image_url: LongUrl | None = None
    """URL of an image, or a data URL with the image itself. Example: "https://example.com/image.png" """
    detail: Literal["auto", "low", "high", "original"] | None = None
    """`low` scales the image down to 512 pixels a side; others leave it as it is. Example: "auto" """
    input_audio: InputAudio | None = None
    """A recording. Example: {"data": "UklGRiQAAABXQVZF", "format": "wav"}"""
    annotations: Any = None
    """Accepted and ignored. Example: []"""
    logprobs: Any = None
    """Accepted and ignored. Example: []"""
    prompt_cache_breakpoint: Any = None
    """Accepted and ignored: equal prefixes are found without it. Example: {}"""

    # Refused by name (`routers/responses/history.py`).
    file_id: str | None = None
    """Not supported: there are no stored files."""


class InputItem(Wire):
    """One item of the input: a message, a call of a tool, its result, or reasoning."""

    type: str | None = None
    """`message`, `function_call`, `function_call_output`, `custom_tool_call`, `custom_tool_call_output`, `reasoning`,
    `compaction` or `item_reference`. An item with a role and no type is a message. Example: "message" """
    id: str | None = None
    """Id of the item; an `item_reference` names an item of a stored response by it. Example: "msg_1" """
    status: str | None = None
    """Accepted and ignored. Example: "completed" """
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Author of a message. Example: "user" """
    content: str | Annotated[list[InputPart], Field(max_length=MAX_MESSAGES)] | None = None
    """Content of a message, or text of reasoning. Example: "Hello" """
    phase: str | None = None
    """Accepted and ignored: of an assistant's message. Example: "final_answer" """
    call_id: str | None = None
    """Joins a call and its result. Example: "call_1" """
    name: str | None = None
    """The tool that was called. Example: "get_weather" """
    namespace: str | None = None
    """The namespace that the tool is of, if it is of one. Example: "weather" """
    arguments: str | None = None
    """JSON text of a function's arguments. Example: "{}" """
    input: str | None = None
    """Input of a custom tool. Example: "ls" """
    output: str | Annotated[list[InputPart], Field(max_length=MAX_MESSAGES)] | None = None
    """The result of a call. Example: "21 degrees" """
    summary: Annotated[list[InputPart], Field(max_length=MAX_MESSAGES)] | None = None
    """Summary of reasoning. Example: []"""
    encrypted_content: str | None = None
    """Reasoning, or a compacted conversation, as this server wrote it. Example: null"""
    caller: Any = None
    """Accepted and ignored. Example: {"type": "direct"}"""
    created_by: Any = None
    """Accepted and ignored. Example: "user-1" """


class ToolGrammar(Wire):
    """Grammar of a custom tool's input."""

    type: str
    """`text` (anything) or `grammar`. Example: "text" """
    syntax: str | None = None
    """`regex` or `lark`. Example: "regex" """
    definition: str | None = None
    """The expression or grammar. The engine holds the model to an expression; a grammar is only shown to it.
    Example: "[0-9]{4}" """


def _bare(tool: Any) -> Any:
    """Reduce a tool that OpenAI runs to its type: it is ignored, and so are its fields."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return {"type": kind} if isinstance(kind, str) and kind not in ("function", "custom", "namespace") else tool


class MemberTool(Wire):
    """A tool that the model may call, perhaps of a namespace."""

    type: str
    """`function`, `custom` or `namespace`. Others, which OpenAI's servers run, are ignored with a warning.
    Example: "function" """
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.:/@-]{1,128}$")] | None = None
    """Its name. Example: "get_weather" """
    description: str | None = None
    """Description of the tool for the model. Example: "Current weather in a city" """
    parameters: dict[str, Any] | None = None
    """JSON schema of a function's arguments. Default: any object.
    Example: {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}"""
    strict: bool | None = None
    """Whether arguments must fit the schema, which the engine sees to. They do as well where `tool_choice` asks for a
    call. Example: false"""
    format: ToolGrammar | None = None
    """Format of a custom tool's input. Example: {"type": "text"}"""
    defer_loading: Any = None
    """Accepted and ignored: all tools are shown. Example: false"""


class ResponsesTool(MemberTool):
    """A tool that the model may call, or a namespace of tools."""

    tools: Annotated[list[Annotated[MemberTool, BeforeValidator(_bare)]], Field(max_length=1 << 12)] | None = None
    """The functions and custom tools of a namespace. Example: [{"type": "function", "name": "get_weather"}]"""


class TextFormat(Wire):
    """Format of the text."""

    type: str
    """`text` (anything), `json_object` or `json_schema`. Example: "text" """
    name: str | None = None
    """Name of the schema; without effect. Example: "person" """
    description: str | None = None
    """Purpose of the schema; has no effect. Example: "A person and an age" """
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema. Example: {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}"""
    strict: bool | None = None
    """Accepted and ignored: the text always follows the schema. Example: true"""


class TextOptions(Wire):
    """Options of the text."""

    format: TextFormat | None = None
    """Format of the text. Example: {"type": "text"}"""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted and ignored. Example: "medium" """


class ReasoningOptions(Wire):
    """Options of the model's reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Given to the chat template as `reasoning_effort`. Example: "low" """
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted and ignored: reasoning is shown as it is. Example: "auto" """
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of `summary`. Example: "auto" """
    context: Any = None
    """Accepted and ignored. Example: "auto" """


class ConversationRef(Wire):
    """A conversation by its id."""

    id: Annotated[str, Field(min_length=1, max_length=128)]
    """Its id. Example: "conv_1" """


class ResponsesStreamOptions(Wire):
    """Options of a stream."""

    include_obfuscation: bool | None = None
    """Accepted and ignored: events are not padded. Example: false"""


class ContextFields(ModelFields):
    """Fields that define the model's input: the same for a response, the count of its tokens, and compaction."""

    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)] | None = None
    """The input, as text or items. Example: "Hello" """
    instructions: str | None = None
    """A system message before the input; those of earlier responses do not count. Example: "Be brief." """
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A stored response that this one continues: its input and output come before the input. Example: "resp_1" """
    conversation: Annotated[str, Field(min_length=1, max_length=128)] | ConversationRef | None = None
    """A conversation to continue; an id not used before begins one. Not together with `previous_response_id`.
    Example: "conv_1" """
    tools: Annotated[list[Annotated[ResponsesTool, BeforeValidator(_bare)]], Field(max_length=1 << 12)] | None = None
    """Tools that the model may call. Example: [{"type": "function", "name": "get_weather"}]"""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto`, `required` (at least one call), the tool to call, or `allowed_tools`. Example: "auto" """
    parallel_tool_calls: bool | None = None
    """Whether one response may have several calls. Example: true"""
    reasoning: ReasoningOptions | None = None
    """Options of the model's reasoning. Example: {"effort": "low"}"""
    text: TextOptions | None = None
    """Options of the text. Example: {"format": {"type": "text"}}"""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` drops the oldest items if the input does not fit the model's context; `disabled` refuses it.
    Example: "disabled" """
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Variables of the chat template, such as `enable_thinking`; the server's settings say which.
    Example: {"enable_thinking": false}"""


class ResponsesRequest(ContextFields, SamplingFields):
    """Body of POST /v1/responses."""

    max_output_tokens: Int64 | None = None
    """Maximum number of tokens to generate, reasoning included. Default: all that fit the context. Example: 64"""
    thinking_token_budget: Annotated[Int32, Field(ge=-1)] | None = None
    """Maximum number of tokens of reasoning, as in chats: its end is then forced. -1 is no limit. Default: the server's
    setting. Example: 1024"""
    top_logprobs: Int32 | None = None
    """Number of most likely tokens to return with each token of the text. Example: 0"""
    store: bool | None = None
    """Keep the response, for `previous_response_id` and GET. Default: true. Example: false"""
    background: bool | None = None
    """Answer at once, and generate in the background; needs `store`. Example: false"""
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], ShortText], Field(max_length=16)] | None = None
    """Up to 16 pairs to keep with the response. Example: {"run": "1"}"""
    include: Annotated[list[Include], Field(max_length=64)] | None = None
    """Additional contents of the response: `reasoning.encrypted_content` or `message.output_text.logprobs`. OpenAI's
    others concern tools that OpenAI runs, and are ignored. Example: ["reasoning.encrypted_content"]"""
    max_tool_calls: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    """Accepted and ignored: it bounds calls of tools that OpenAI runs. Example: 8"""
    stream_options: ResponsesStreamOptions | None = None
    """Options of a stream. Example: {"include_obfuscation": false}"""

    # Accepted and without effect.
    user: Annotated[str, Field(max_length=512)] | None = None
    """Accepted, returned and ignored. Example: "user-1" """
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    """Accepted, returned and ignored. Example: "user-1" """
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    """Accepted, returned and ignored: equal prefixes are found without it. Example: "chats" """
    prompt_cache_retention: Any = None
    """Accepted and ignored. Example: "24h" """
    prompt_cache_options: Any = None
    """Accepted and ignored. Example: {}"""
    service_tier: Any = None
    """Accepted and ignored. Example: "auto" """
    client_metadata: Any = None
    """Accepted and ignored. Example: {}"""

    # Refused by name when they are set (`routers/fields.py`).
    prompt: Any = None
    """Not supported: there are no stored prompt templates."""
    moderation: Any = None
    """Not supported."""
    context_management: Any = None
    """Not supported; POST /v1/responses/compact compacts a conversation."""


class ResponseCreate(ResponsesRequest):
    """A client's message in the WebSocket mode of /v1/responses: the body of POST, and what concerns the connection."""

    type: Literal["response.create"]
    """Kind of this message. Example: "response.create" """
    stream_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """The lane of this response: those of a lane come one after the other. Its events repeat it. Example: "main" """
    generate: bool | None = None
    """False computes the prompt, so that its KV blocks are cached, and answers without output. Default: true.
    Example: true"""


class InputTokensRequest(ContextFields):
    """Body of POST /v1/responses/input_tokens."""


class CompactRequest(ModelFields):
    """Body of POST /v1/responses/compact."""

    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)] | None = None
    """The conversation to compact, as text or items. Example: "Hello" """
    instructions: str | None = None
    """A system message before the input. Example: "Be brief." """
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A stored response that comes before the input. Example: "resp_1" """
    prompt_cache_key: Any = None
    """Accepted and ignored. Example: "chats" """
    prompt_cache_retention: Any = None
    """Accepted and ignored. Example: "24h" """
    service_tier: Any = None
    """Accepted and ignored. Example: "auto" """


class ResponseInputDetails(BaseModel):
    """Parts of `input_tokens`."""

    cached_tokens: int
    """Tokens whose KV blocks were cached."""
    cache_write_tokens: int
    """Always 0: nothing is charged for caching."""


class ResponseOutputDetails(BaseModel):
    """Parts of `output_tokens`."""

    reasoning_tokens: int
    """Tokens of reasoning."""


class ResponseUsage(BaseModel):
    """Numbers of tokens."""

    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: ResponseInputDetails
    """Parts of `input_tokens`."""
    output_tokens: int
    """Tokens generated."""
    output_tokens_details: ResponseOutputDetails
    """Parts of `output_tokens`."""
    total_tokens: int
    """The sum of both."""


class Response(BaseModel):
    """The answer when `stream` is false; also what is stored. Fields not described here repeat the request's."""

    id: str
    """Id of the response."""
    object: Literal["response"]
    """Kind of this object."""
    created_at: int
    """Unix time in seconds."""
    completed_at: int | None
    """The same of the end, once completed."""
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    """`incomplete` if `incomplete_details` says why it ended early, `failed` if `error` does."""
    incomplete_details: dict[str, Any] | None
    """Reason why the response is incomplete."""
    error: dict[str, Any] | None
    """Reason why the response failed."""
    model: str
    """Name of the model."""
    output: list[dict[str, Any]]
    """Items of type `message`, `reasoning`, `function_call` or `custom_tool_call`."""
    usage: ResponseUsage | None
    """Numbers of tokens, once the response has ended."""


class DeletedResponse(BaseModel):
    """Answer to DELETE."""

    id: str
    """Id of the response."""
    object: Literal["response"] = "response"
    """Kind of this object."""
    deleted: bool = True
    """Always true."""


class ItemList(BaseModel):
    """A page of the input items of a stored response."""

    object: Literal["list"] = "list"
    """Kind of this object."""
    data: list[dict[str, Any]]
    """The items."""
    first_id: str | None
    """Id of the first."""
    last_id: str | None
    """Id of the last, for `after`."""
    has_more: bool
    """Whether more follow."""


class InputTokens(BaseModel):
    """Answer to POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    """Kind of this object."""
    input_tokens: int
    """Tokens of the prompt."""


class CompactedResponse(BaseModel):
    """Answer to POST /v1/responses/compact."""

    id: str
    """Id of the compaction."""
    object: Literal["response.compaction"] = "response.compaction"
    """Kind of this object."""
    created_at: int
    """Unix time in seconds."""
    output: list[dict[str, Any]]
    """The user's messages, and an item of type `compaction` in place of the rest: the input of the next request."""
    usage: ResponseUsage
    """Numbers of tokens."""
