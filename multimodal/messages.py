"""Chat messages and template variables, from the wire to what templates take."""

from collections.abc import Sequence
from typing import Any

from multimodal.errors import RequestError
from protocol.chat import ChatCompletionRequest, ChatMessage

_CARRIED = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def to_template(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it, with its content as one text."""
    carried = {name: value for name in _CARRIED if (value := getattr(message, name)) is not None}
    return {"role": message.role, "content": _text(message), **carried}


def template_variables(body: ChatCompletionRequest, allowed: Sequence[str]) -> dict[str, Any]:
    """Variables for the template; those of the request only as far as the server allows them."""
    asked = dict(body.chat_template_kwargs or {})
    for name in asked:
        if name not in allowed:
            raise RequestError(
                "A variable in 'chat_template_kwargs' is not allowed; the server's setting lists those that are.", "chat_template_kwargs"
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
        return ""
    texts = []
    for part in message.content:
        if part.type not in ("text", "input_text", "refusal"):
            raise RequestError(
                "This model takes text only; a message has a content part of another type.", "messages", "unsupported_content"
            )
        if part.text is None:
            raise RequestError("A text part has no 'text'.", "messages")
        texts.append(part.text)
    return "\n".join(texts)
