"""Chat messages and template variables, from the wire to what templates take."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.media import Detail, MediaKind
from multimodal.errors import RequestError
from protocol.chat import ChatCompletionRequest, ChatMessage, ContentPart

_REFUSED_PARTS = frozenset({"video_url", "input_audio", "audio_url", "file"})


@dataclass(frozen=True)
class MediaRef:
    """What a content part of a message names: a file, by its URL; `param` is the part's place in the request."""

    url: str
    detail: Detail
    param: str
    kind: MediaKind = "image"


def to_template(message: ChatMessage, vision: bool = False) -> dict[str, Any]:
    """A message as templates expect it, with its content as one text.

    With images, which a `vision` model takes, it is a list: {"type": "text", "text": …} and {"type": "image"} in the message's order.
    """
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise RequestError(
                f"This server does not support {name!r} in a message.", "messages", "unsupported_content"
            )
    shown: dict[str, Any] = {"role": message.role, "content": _content(message, vision)}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls is not None:
        shown["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        shown |= {"reasoning_content": reasoning, "thinking": reasoning}
    return shown


def template_variables(body: ChatCompletionRequest, allowed: Sequence[str]) -> dict[str, Any]:
    """Variables for the template; those of the request only as far as the server allows them."""
    asked = dict(body.chat_template_kwargs or {})
    if unknown := next((name for name in asked if name not in allowed), None):
        shown = "".join(c if c.isprintable() else "?" for c in unknown[:64])
        raise RequestError(
            f"{shown!r} is not allowed in 'chat_template_kwargs'; the server's setting lists what is.",
            "chat_template_kwargs",
        )
    if body.reasoning_effort is not None:
        asked.setdefault("reasoning_effort", body.reasoning_effort)
    if body.documents is not None:
        asked.setdefault("documents", body.documents)
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message"
        )
    prompts = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {**asked, "add_generation_prompt": prompts, "continue_final_message": continues}


def media_refs(messages: Sequence[ChatMessage]) -> list[MediaRef]:
    """Return the media of all messages, in order. `to_template` has checked their content parts."""
    return list(_media_refs(messages))


def check_count(images: Sequence[MediaRef], most: int) -> None:
    """Raises RequestError if a request has more than `most` images."""
    if len(images) > most:
        raise RequestError(f"The messages may have {most} images at most.", "messages", "too_many_images")


def check_marks(messages: Sequence[dict[str, Any]], marks: Iterable[str]) -> None:
    """Refuse messages, as `to_template` returns them, whose own text would be taken for an image."""
    for message in messages:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        if mark := next((mark for mark in marks for text in texts if mark in text), None):
            raise RequestError(f"The text of a message must not have {mark!r}, which stands for an image.", "messages")


def _media_refs(messages: Sequence[ChatMessage]) -> Iterator[MediaRef]:
    for place, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == "image_url" and part.image_url is not None:
                image, param = part.image_url, f"messages.{place}.content.{index}.image_url"
                url, detail = (image, None) if isinstance(image, str) else (image.url, image.detail)
                yield MediaRef(url, detail or "auto", param)


def _content(message: ChatMessage, vision: bool) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role != "assistant":
            raise RequestError(f"The content of a {message.role} message must not be null.", "messages")
        return message.refusal or ""
    if not any(part.type == "image_url" for part in message.content):
        return "\n".join(map(_text, message.content))
    if not vision:
        raise RequestError("This model takes text only; a message has an image.", "messages", "unsupported_content")
    return [
        _image(part) if part.type == "image_url" else {"type": "text", "text": _text(part)} for part in message.content
    ]


def _text(part: ContentPart) -> str:
    if part.type in _REFUSED_PARTS:
        raise RequestError(
            f"This server does not support content parts of type {part.type!r}.", "messages", "unsupported_content"
        )
    if part.type not in ("text", "input_text", "refusal"):
        raise RequestError("A message has a content part of an unknown type.", "messages", "unsupported_content")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise RequestError("A text part of a message has no text.", "messages")
    return text


def _image(part: ContentPart) -> dict[str, Any]:
    image = part.image_url
    if not (image if isinstance(image, str | None) else image.url):
        raise RequestError("An image part of a message has no URL.", "messages")
    return {"type": "image"}


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI writes a call's arguments as JSON text; templates expect the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}
    except (ValueError, RecursionError):
        raise RequestError("The arguments of a tool call are not valid JSON.", "messages") from None
