"""POST /v1/chat/completions."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from engine.media import FrameSampling, MediaKind
from multimodal.answers.shapes import ChatShape
from multimodal.errors import RequestError, shown
from multimodal.request import Ask, Conversation, MediaRef
from protocol.chat import (
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    ImageUrl,
    MessageFunctionCall,
)
from protocol.tokenize import TokenizeRequest
from routers.endpoint import Endpoint
from routers.fields import to_ask
from routers.tools import tools_of

_TEXT_PARTS = ("text", "input_text", "refusal")
MEDIA_PARTS: dict[str, MediaKind] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Fields, and types, of content parts that name or have a file, and the file's kind."""
REFUSED_PARTS = frozenset({"file"})
"""Fields, and types, of content parts that are not supported."""


def convert(body: ChatCompletionRequest) -> Ask:
    """Return the request of a body. Raises RequestError."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    given = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    variables = {name: value for name, value in given.items() if value is not None}
    fields = {"prompt": "messages", "logprobs": "top_logprobs"}
    own: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    if body.max_completion_tokens is not None:
        own["max_tokens"] = body.max_completion_tokens
        fields["max_tokens"] = "max_completion_tokens"
    own["tools"], shown_tools = tools_of(body)
    own["include_reasoning"] = body.include_reasoning is not False
    fields["reasoning_budget"], own["reasoning_budget"] = _reasoning_budget(body)
    return to_ask(body, conversation(body, body.messages, variables, shown_tools), fields, **own)


def _reasoning_budget(body: ChatCompletionRequest) -> tuple[str, int | None]:
    """Return the body's name for the budget of reasoning, and its value."""
    named = {
        "thinking_token_budget": body.thinking_token_budget,
        "thinking_budget": body.thinking_budget,
        "nvext.max_thinking_tokens": body.nvext.max_thinking_tokens if body.nvext is not None else None,
    }
    return next(((name, value) for name, value in named.items() if value is not None), ("thinking_token_budget", None))


def conversation(
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    variables: dict[str, Any],
    tools: list[dict[str, Any]],
) -> Conversation:
    """Return the conversation of a body. Raises RequestError."""
    return Conversation(
        messages=[to_template(message, place) for place, message in enumerate(messages)],
        media=list(_media_refs(messages, _sampling(body))),
        tools=tools,
        as_sent=True,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        variables=variables,
    )


def to_template(message: ChatMessage, place: int = 0) -> dict[str, Any]:
    """Return the message at `place` as templates expect it (`Conversation`). Raises RequestError."""
    if message.audio is not None:
        raise _unsupported("This server does not support 'audio' in a message.")
    role = "tool" if message.role == "function" else message.role
    found: dict[str, Any] = {"role": role, "content": _content(message, f"messages.{place}.content")}
    given = {"name": message.name, "tool_call_id": message.tool_call_id}
    found |= {name: value for name, value in given.items() if value is not None}
    spelled = f"messages.{place}.tool_calls"
    if message.tool_calls:
        found["tool_calls"] = [
            call.model_dump(exclude_unset=True) | {"function": _called(call.function, f"{spelled}.{index}")}
            for index, call in enumerate(message.tool_calls)
        ]
    elif message.function_call is not None:
        function = _called(message.function_call, f"messages.{place}.function_call")
        found["tool_calls"] = [{"type": "function", "function": function}]
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        found |= {"reasoning_content": reasoning, "thinking": reasoning}
    return found


def _sampling(body: ChatCompletionRequest | TokenizeRequest) -> FrameSampling:
    """Return which frames of videos the body asks for. Raises RequestError."""
    named = {
        "media_io_kwargs.video": body.media_io_kwargs.video if body.media_io_kwargs is not None else None,
        "mm_processor_kwargs": body.mm_processor_kwargs,
    }
    given = {name: options for name, options in named.items() if options is not None}
    if len(given) > 1:
        raise RequestError("'mm_processor_kwargs' cannot be used with 'media_io_kwargs'.", "mm_processor_kwargs")
    for name, options in given.items():
        if options.model_extra:
            param = name.partition(".")[0]
            raise RequestError(f"'{name}' takes 'fps' and 'num_frames' alone.", param, "unsupported_parameter")
        return FrameSampling(options.fps or 0.0, options.num_frames or 0)
    return FrameSampling()


def _media_refs(messages: Sequence[ChatMessage], sampling: FrameSampling) -> Iterator[MediaRef]:
    for place, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            kind = MEDIA_PARTS.get(part.type)
            given = getattr(part, part.type) if kind is not None else None
            if kind is None or given is None:
                continue
            url = given if isinstance(given, str) else given.url
            detail = given.detail if isinstance(given, ImageUrl) else None
            param = f"messages.{place}.content.{index}.{part.type}"
            yield MediaRef(url, detail or "auto", param, kind, sampling if kind == "video" else FrameSampling())


def _content(message: ChatMessage, param: str) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role != "assistant":
            raise RequestError(f"The content of a {message.role} message must not be null.", "messages")
        return message.refusal or ""
    parts = [_part(part, f"{param}.{index}") for index, part in enumerate(message.content)]
    if not any(part.type in MEDIA_PARTS for part in message.content):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: ContentPart, param: str) -> dict[str, Any]:
    """Return a part as templates expect it. Raises RequestError."""
    if part.type in _TEXT_PARTS:
        name = "refusal" if part.type == "refusal" else "text"
        if (text := getattr(part, name)) is None:
            raise RequestError(f"'{param}' has no text.", f"{param}.{name}")
        return {"type": "text", "text": text}
    if part.type not in MEDIA_PARTS:
        raise _wrong_type(part.type, f"{param}.type")
    given = getattr(part, part.type)
    if not (given if isinstance(given, str | None) else given.url):
        raise RequestError(f"'{param}.{part.type}' is missing, or has no URL.", f"{param}.{part.type}")
    return {"type": MEDIA_PARTS[part.type]}


def _wrong_type(given: str, param: str) -> RequestError:
    if given in REFUSED_PARTS:
        return _unsupported(f"This server does not support content parts of type {given!r}.", param)
    *known, last = (*_TEXT_PARTS, *MEDIA_PARTS)
    return _unsupported(f"'{param}' must be {', '.join(known)} or {last}, not '{shown(given)}'.", param)


def _unsupported(message: str, param: str = "messages") -> RequestError:
    return RequestError(message, param, "unsupported_content")


def _called(function: MessageFunctionCall, param: str) -> dict[str, Any]:
    """Return a call as templates expect it: with its arguments as an object, which OpenAI writes as JSON text."""
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise RequestError(f"The arguments of '{param}' are not valid JSON.", param) from None
        if not isinstance(arguments, dict):
            raise RequestError(f"The arguments of '{param}' must be a JSON object.", param)
    return function.model_dump(exclude_unset=True) | {"arguments": arguments}


ENDPOINT = Endpoint(
    path="/v1/chat/completions",
    name="chat_completions",
    summary="Create a chat completion",
    description=(
        "Answer a chat. With `stream` the answer is a stream of server-sent events, closed by `data: [DONE]`."
    ),
    body=ChatCompletionRequest,
    chunk="ChatCompletionChunk",
    answer=ChatCompletion,
    convert=convert,
    shape=ChatShape,
)
