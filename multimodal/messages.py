"""Chat messages and template variables, from the wire to what templates take."""

import json
from collections.abc import Sequence
from typing import Any

from multimodal.errors import RequestError
from protocol.chat import ChatCompletionRequest, ChatMessage


def to_template(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it, with its content as one text."""
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise RequestError(f"This server does not support {name!r} in a message.", "messages", "unsupported_content")
    shown: dict[str, Any] = {"role": message.role, "content": _text(message)}
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
            f"{shown!r} is not allowed in 'chat_template_kwargs'; the server's setting lists what is.", "chat_template_kwargs"
        )
    if body.reasoning_effort is not None:
        asked.setdefault("reasoning_effort", body.reasoning_effort)
    if body.documents is not None:
        asked.setdefault("documents", body.documents)
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError("'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message")
    prompts = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {**asked, "add_generation_prompt": prompts, "continue_final_message": continues}


def _text(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role != "assistant":
            raise RequestError(f"The content of a {message.role} message must not be null.", "messages")
        return message.refusal or ""
    return "\n".join(_part(part.type, part.refusal if part.type == "refusal" else part.text) for part in message.content)


def _part(kind: str, text: str | None) -> str:
    if kind not in ("text", "input_text", "refusal"):
        raise RequestError("This model takes text only; a message has a content part of another type.", "messages", "unsupported_content")
    if text is None:
        raise RequestError("A text part of a message has no text.", "messages")
    return text


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI writes a call's arguments as JSON text; templates expect the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}
    except (ValueError, RecursionError):
        raise RequestError("The arguments of a tool call are not valid JSON.", "messages") from None
