"""POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from protocol.common import MAX_MESSAGES, GenerationFields, Int32, LongUrl, Usage, Wire


class ImageUrl(Wire):
    """Where an image is: http(s), a data URL, or a file of the server's folder of media."""

    url: LongUrl
    detail: Literal["auto", "low", "high"] | None = None


class ContentPart(Wire):
    """One part of a message's content; `text` is the only type that a text model takes."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | LongUrl | None = None

    # Refused by name (`routers/chat.py`).
    video_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    file: Any = None


class ChatMessage(Wire):
    """A message as clients send it; `content` may be null for an assistant's."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    # What OpenAI's answers carry, and clients send back.
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ChatCompletionRequest(GenerationFields):
    """OpenAI's request, with the extensions of GenerationFields."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    # Refused by name when they are set (`routers/fields.py`).
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    echo: Any = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer when `stream` is false; with it, chunks of the same shape whose choices have `delta` for `message`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
