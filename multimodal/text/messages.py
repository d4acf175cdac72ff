"""Conversations as chat templates take them, and the checks that they need besides those of their API."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.media import Detail, MediaKind
from multimodal.errors import RequestError

_MARKUP = 32
"""Characters that templates write for a message, or a part of one, besides its text."""


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A file that a content part of a message names, by its URL; `param` names the field."""

    url: str
    detail: Detail
    param: str
    kind: MediaKind = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a request, whichever API they came by.

    A message's content is one text or, with images in it, a list: {"type": "text", "text": …} and {"type": "image"} in
    order.
    """

    messages: list[dict[str, Any]]
    media: list[MediaRef] = field(default_factory=list)
    """The media of all messages, in order."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the template that the client names; the server's setting says which it may set."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the template that the API has fields for; `template_kwargs` override them."""

    @property
    def characters(self) -> int:
        """Rough length of all contents, of which each message and part has some."""
        return sum(map(_length, (message["content"] for message in self.messages)))


def _length(content: str | list[dict[str, Any]]) -> int:
    if isinstance(content, str):
        return _MARKUP + len(content)
    return sum(_MARKUP + len(part.get("text", "")) for part in content)


def template_variables(chat: Conversation, allowed: Sequence[str]) -> dict[str, Any]:
    """Return the variables for the template. Raises RequestError for one that the server does not allow."""
    if unknown := next((name for name in chat.template_kwargs if name not in allowed), None):
        shown = "".join(c if c.isprintable() else "?" for c in unknown[:64])
        raise RequestError(
            f"{shown!r} is not allowed in 'chat_template_kwargs'; the server's setting lists what is.",
            "chat_template_kwargs",
        )
    continues = chat.continue_final_message
    if continues and chat.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message"
        )
    prompts = not continues if chat.add_generation_prompt is None else chat.add_generation_prompt
    own = {"add_generation_prompt": prompts, "continue_final_message": continues}
    return {**chat.variables, **chat.template_kwargs, **own}


def check_count(images: Sequence[MediaRef], most: int) -> None:
    """Raise RequestError if a request has more than `most` images."""
    if len(images) > most:
        raise RequestError(f"The messages may have {most} images at most.", "messages", "too_many_images")


def check_forged(messages: Sequence[dict[str, Any]], forged: Sequence[str]) -> None:
    """Raise RequestError if messages have control tokens: `forged`."""
    for token in forged[:1]:
        holds = (place for place, message in enumerate(messages) if token in json.dumps(message, ensure_ascii=False))
        place = next(holds, None)  # none if several texts make it, or a variable of the template has it
        where = "messages" if place is None else f"messages.{place}"
        raise RequestError(f"{where!r} must not have {token!r}, which controls the model.", where, "special_token")
