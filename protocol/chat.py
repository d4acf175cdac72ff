"""POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from protocol.common import MAX_MESSAGES, GenerationFields, InputAudio, Int32, Int64, LongUrl, Usage, Wire


class ImageUrl(Wire):
    """Location of an image."""

    url: LongUrl
    """http(s), a data URL (data:image/png;base64,…), or a file of the server's folder of media.
    Example: "https://example.com/image.png" """
    detail: Literal["auto", "low", "high", "original"] | None = None
    """`low` scales the image down to 512 pixels a side; others leave it as it is. Example: "auto" """


class VideoUrl(Wire):
    """Location of a video."""

    url: LongUrl
    """http(s), a data URL (data:video/mp4;base64,…), or a file of the server's folder of media.
    Example: "https://example.com/video.mp4" """


class AudioUrl(Wire):
    """Location of a recording."""

    url: LongUrl
    """http(s), a data URL (data:audio/wav;base64,…), or a file of the server's folder of media.
    Example: "https://example.com/speech.wav" """


class ContentPart(Wire):
    """One part of a message's content. A text model takes only text."""

    type: str
    """`text` (or `input_text`), `refusal`, `image_url`, `video_url`, `audio_url` or `input_audio`: the field that has
    the content. Example: "text" """
    text: str | None = None
    """The text. Example: "Hello" """
    refusal: str | None = None
    """Text with which an assistant refused. Example: "No." """
    image_url: ImageUrl | LongUrl | None = None
    """The image, as an object or by its URL alone. Example: {"url": "https://example.com/image.png"}"""
    video_url: VideoUrl | LongUrl | None = None
    """The video, as an object or by its URL alone. Example: {"url": "https://example.com/video.mp4"}"""

    audio_url: AudioUrl | LongUrl | None = None
    """The recording, as an object or by its URL alone. Example: {"url": "https://example.com/speech.wav"}"""
    input_audio: InputAudio | None = None
    """The recording itself, as OpenAI has it. Example: {"data": "UklGRiQAAABXQVZF", "format": "wav"}"""

    # Refused by name (`routers/chat.py`).
    file: Any = None
    """Not supported."""


class FunctionDefinition(Wire):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.:/@-]{1,128}$")]
    """Its name. Example: "get_weather" """
    description: str | None = None
    """Description of the function for the model. Example: "Current weather in a city" """
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments. Default: any object.
    Example: {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}"""
    strict: bool | None = None
    """Hold arguments to the schema by a grammar. Example: false"""


class FunctionTool(Wire):
    """A tool of the request."""

    type: str
    """Always `function`. Example: "function" """
    function: FunctionDefinition | None = None
    """The function. Example: {"name": "get_weather", "parameters": {"type": "object"}}"""


class MessageFunctionCall(Wire):
    """The function that a call names, and what it is called with."""

    name: str
    """Its name. Example: "get_weather" """
    arguments: str | dict[str, Any] | None = None
    """JSON text of an object, or the object. Default: no arguments. Example: "{\\"city\\": \\"Rome\\"}" """


class MessageToolCall(Wire):
    """A call that an assistant made, as its answer had it."""

    id: str | None = None
    """Name of the call, to which a tool's message answers. Example: "call_1" """
    type: str | None = None
    """Always `function`. Example: "function" """
    function: MessageFunctionCall
    """The function. Example: {"name": "get_weather", "arguments": "{}"}"""
    index: int | None = None
    """Place among the answer's calls, as streams have it; without effect. Example: 0"""


class ChatMessage(Wire):
    """A message as clients send it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """Role of the author. Example: "user" """
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Content as text or as parts; null is allowed only for an assistant. Example: "Hello" """
    name: str | None = None
    """Name of the author, for templates that show it. Example: "Ann" """
    tool_calls: list[MessageToolCall] | None = None
    """Calls that an assistant made.
    Example: [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]"""
    tool_call_id: str | None = None
    """The call that a tool answers. Example: "1" """
    refusal: str | None = None
    """An assistant's refusal, in place of content. Example: "No." """
    reasoning_content: str | None = None
    """An assistant's reasoning, for templates that show it. Example: "Let me think." """
    reasoning: str | None = None
    """The same under another name. Example: "Let me think." """

    # Fields of OpenAI's answers, which clients send back.
    annotations: Any = None
    """Accepted and ignored. Example: []"""
    function_call: MessageFunctionCall | None = None
    """The call that an assistant made, as OpenAI's old interface has it. Example: {"name": "f", "arguments": "{}"}"""
    audio: Any = None
    """Not supported."""


class VideoSampling(Wire):
    """The frames to take of a video."""

    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Frames of a second of the video. Default: the server's setting, or the model's. Example: 2"""
    num_frames: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """Number of frames; with `fps`, the maximum number. The server's setting limits it. Example: 8"""


class MediaOptions(Wire):
    """Options for reading the media of a request, by kind of media, as in vLLM."""

    video: VideoSampling | None = None
    """Videos. Example: {"num_frames": 8}"""


class NvidiaExtensions(Wire):
    """Fields of NVIDIA's servers."""

    max_thinking_tokens: Annotated[Int32, Field(ge=-1)] | None = None
    """The same as `thinking_token_budget`. Example: 1024"""


class ChatCompletionRequest(GenerationFields):
    """OpenAI's request, with extensions. Null means the default of a field."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """The chat so far. Example: [{"role": "user", "content": "Hello"}]"""
    max_completion_tokens: Int64 | None = None
    """OpenAI's new name of `max_tokens`, which it overrides. Default: all that fit the context. Example: 64"""
    logprobs: bool | None = None
    """Return the log-probabilities of the output's tokens. Example: false"""
    top_logprobs: Int32 | None = None
    """Number of alternatives for each token; only with `logprobs`. Example: 2"""
    reasoning_effort: str | None = None
    """Handed to the chat template, if it has this variable. Example: "low" """
    add_generation_prompt: bool | None = None
    """End the prompt with what begins the assistant's answer. Default: true, unless `continue_final_message` is set.
    Example: true"""
    continue_final_message: bool | None = None
    """End the prompt where the last message ends, for the model to continue that. Example: false"""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template that the server's settings let requests set. Example: {}"""
    documents: list[dict[str, Any]] | None = None
    """Handed to the chat template, if it has this variable. Example: [{"title": "A", "text": "…"}]"""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Functions that the model may call. Example: [{"type": "function", "function": {"name": "get_time"}}]"""
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    """`auto`, `none` (as without tools), `required`, one function, or `allowed_tools`. What requires a call makes it
    valid by a grammar. Default: auto. Example: "auto" """
    parallel_tool_calls: bool | None = None
    """Whether one answer may have several calls. Default: true. Example: true"""
    functions: Annotated[list[FunctionDefinition], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """OpenAI's old name of `tools`; the answer has `function_call` then. Example: [{"name": "get_time"}]"""
    function_call: Literal["auto", "none"] | dict[str, Any] | None = None
    """`auto`, `none` or one function, for `functions`. Example: "auto" """
    include_reasoning: bool | None = None
    """Whether the answer has the model's reasoning, if it has a parser for that. Default: true. Example: true"""
    thinking_token_budget: Annotated[Int32, Field(ge=-1)] | None = None
    """Maximum number of tokens of reasoning in a choice, as vLLM and TensorRT-LLM spell it: the end of reasoning is
    then forced, and the answer follows. -1 is no limit. Default: the server's setting. Example: 1024"""
    thinking_budget: Annotated[Int32, Field(ge=-1)] | None = None
    """The same as `thinking_token_budget`. Example: 1024"""
    nvext: NvidiaExtensions | None = None
    """NVIDIA's name for it, `max_thinking_tokens`. Example: {"max_thinking_tokens": 1024}"""

    media_io_kwargs: MediaOptions | None = None
    """The frames to take of the request's videos. Example: {"video": {"num_frames": 8}}"""
    mm_processor_kwargs: VideoSampling | None = None
    """The same, under another name of vLLM's; other options are the server's. Example: {"fps": 2}"""

    # Refused by name when they are set (`routers/fields.py`).
    modalities: Any = None
    """Only text is supported."""
    audio: Any = None
    """Not supported."""
    web_search_options: Any = None
    """Not supported."""
    moderation: Any = None
    """Not supported."""
    echo: Any = None
    """Not supported in chats."""
    chat_template: Any = None
    """Not supported in requests; the server's settings name a template."""


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    """Text of the token; bytes that are no UTF-8 read U+FFFD."""
    logprob: float
    """Natural logarithm of its probability."""
    bytes: list[int] | None
    """The token's bytes."""


class TokenLogprob(TopLogprob):
    """A token of the output."""

    top_logprobs: list[TopLogprob]
    """The most likely tokens in its place."""


class ChoiceLogprobs(BaseModel):
    """Log-probabilities of a choice."""

    content: list[TokenLogprob] | None
    """One entry for each token."""
    refusal: None = None
    """Always null."""


class CalledFunction(BaseModel):
    """A function and its arguments."""

    name: str
    """Name of the tool."""
    arguments: str
    """JSON text of an object."""


class CalledTool(BaseModel):
    """A call of a tool."""

    id: str
    """Id of the call, which the tool's message repeats."""
    type: Literal["function"] = "function"
    """Kind of the tool."""
    function: CalledFunction
    """The function and its arguments."""


class AssistantMessage(BaseModel):
    """The model's answer."""

    role: Literal["assistant"] = "assistant"
    """Role of the author."""
    content: str | None
    """The text; null if there are calls alone."""
    refusal: str | None = None
    """Always null."""
    reasoning_content: str | None = None
    """The model's reasoning, if any."""
    tool_calls: list[CalledTool] | None = None
    """Calls of tools, if any."""
    function_call: CalledFunction | None = None
    """The call, if the request has `functions`."""


class ChatChoice(BaseModel):
    """One answer to the chat."""

    index: int
    """Place among the choices."""
    message: AssistantMessage
    """The answer."""
    logprobs: ChoiceLogprobs | None
    """Null unless the request asks for them."""
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]
    """`stop` at the end of the sequence or a stop string, `length` at `max_tokens` or the context's end, `tool_calls`
    (or `function_call`) for an answer that calls tools."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it, an extension."""
    token_ids: list[int] | None = None
    """Token ids of the output, with `return_token_ids`."""


class ChatCompletion(BaseModel):
    """The answer when `stream` is false."""

    id: str
    """Id of the answer, made of the request's."""
    object: Literal["chat.completion"] = "chat.completion"
    """Kind of this object."""
    created: int
    """Unix time in seconds."""
    model: str
    """Name of the model."""
    system_fingerprint: str
    """Changes when the server is started anew."""
    choices: list[ChatChoice]
    """The answers, `n` of them."""
    usage: Usage
    """Numbers of tokens."""
