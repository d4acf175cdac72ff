"""Anthropic's message: items in, its JSON out, streamed or whole."""

import base64
import hashlib
from typing import Any

import orjson

from multimodal.answers.choices import Piece
from multimodal.answers.items import Added, Closed, Ended, Item, Opened, Reducer, TokenUsage
from multimodal.answers.shapes import AnswerContext, Shape


class MessageShape(Shape):
    """A message of content blocks, one for each item of the answer."""

    operation = "chat"
    api = "messages"

    def __init__(self, context: AnswerContext) -> None:
        (choice,) = context.choices
        self.id = f"msg_{context.request_id}"
        self._ask = context.ask
        self._reducer = Reducer(choice, self.id)
        self._message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": context.model,
            "content": [],
            **_reason(None, None),
            "container": None,
        }

    def stream(self, piece: Piece) -> list[bytes]:
        events: list[bytes] = []
        if piece.prompt is not None:
            events.append(_event("message_start", message=self._with_usage(self._reducer.usage)))
        for happening in self._reducer.feed(piece):
            match happening:
                case Added():
                    events.append(_delta(happening.item, _ADDED[happening.item.kind], happening.text))
                case Opened():
                    item = happening.item
                    events.append(_event("content_block_start", index=item.place, content_block=_opened(item)))
                case Closed():
                    item = happening.item
                    if item.kind == "reasoning":
                        events.append(_delta(item, ("signature_delta", "signature"), _signature(item.text)))
                    events.append(_event("content_block_stop", index=item.place))
                case Ended():
                    usage = _usage(happening.usage)
                    events.append(_event("message_delta", delta=self._reason(happening), usage=usage))
                    events.append(_event("message_stop"))
        return events

    def end(self) -> list[bytes]:
        return []

    def add(self, piece: Piece) -> None:
        for happening in self._reducer.feed(piece):
            if isinstance(happening, Ended):
                self._message = self._with_usage(happening.usage) | self._reason(happening)

    def whole(self) -> bytes:
        return orjson.dumps(self._message | {"content": [_block(item) for item in self._reducer.items]})

    def _with_usage(self, usage: TokenUsage) -> dict[str, Any]:
        """Return the message with the usage of the whole request."""
        found = {**_usage(usage), "cache_creation": None, "service_tier": "standard", "inference_geo": None}
        return self._message | {"usage": found}

    def _reason(self, ended: Ended) -> dict[str, Any]:
        """Return the reason for the end of the answer."""
        if isinstance(ended.stop_reason, str):
            return _reason("stop_sequence", ended.stop_reason)
        if ended.finish_reason == "length":
            fits = ended.usage.output >= (self._ask.default_max_tokens or 0)
            return _reason("max_tokens" if fits else "model_context_window_exceeded", None)
        called = any(item.kind == "call" for item in self._reducer.items)
        return _reason("tool_use" if called else "end_turn", None)


_ADDED = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The kind of a delta, and its field, for each kind of item."""
_CALLER = {"type": "direct"}
"""The model itself."""


def _reason(reason: str | None, sequence: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _event(kind: str, **fields: Any) -> bytes:
    return orjson.dumps({"type": kind, **fields})


def _delta(item: Item, spelled: tuple[str, str], text: str) -> bytes:
    kind, name = spelled
    return _event("content_block_delta", index=item.place, delta={"type": kind, name: text})


def _opened(item: Item) -> dict[str, Any]:
    """Return the block of an item that has no text yet."""
    match item.kind:
        case "text":
            return {"type": "text", "text": "", "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": {}, "caller": _CALLER}


def _block(item: Item) -> dict[str, Any]:
    """Return the block of a whole item."""
    text = item.text
    match item.kind:
        case "text":
            return _opened(item) | {"text": text}
        case "reasoning":
            return _opened(item) | {"thinking": text, "signature": _signature(text)}
        case "call":
            # As the model wrote it; only a call that broke off has no object.
            return _opened(item) | {"input": orjson.Fragment(text) if item.complete and text[0] == "{" else {}}


def _signature(text: str) -> str:
    """Return the signature that a client must send back with reasoning. It is not secret: a client may change its own
    prompts."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
        "server_tool_use": None,
    }
