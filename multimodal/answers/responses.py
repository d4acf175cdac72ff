"""OpenAI's Responses: events about an answer's items in, events and the response object of the API out."""

import json
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from engine.types import Logprob, TokenLogprobs
from multimodal.answers.choices import Piece
from multimodal.answers.items import Added, Closed, Ended, Happening, Item, Opened, Reducer
from multimodal.answers.shapes import AnswerContext, Shape

PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_", "custom": "ctc_"}
_SEALED = "trellis-1:"
_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*'
)
"""Text of a JSON string up to its end, or to an escape that is not whole."""

Ending = Literal["failed", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The fields of a response that repeat its request, and options of its items."""

    unique: str
    """Part of the ids of the response and its items."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the request that the response repeats."""
    custom: frozenset[str] = frozenset()
    """Names of custom tools, which the model calls as functions with one text, `input`."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of tools, by their names for the model."""
    seal: bool = False
    """Whether reasoning items have `encrypted_content`."""
    generate: bool = True
    """Whether the response has output; otherwise it is complete without any."""
    created_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"resp_{self.unique}"


class ResponsesShape(Shape):
    """A response and its events. Every event gets its sequence number here, once."""

    operation = "responses"
    api = "responses"

    def __init__(self, context: AnswerContext, asked: Asked | None = None) -> None:
        self.asked = asked or Asked(unique=context.request_id)
        self.id = self.asked.id
        self.ended = False
        """Whether the response has ended, with any status."""
        self.stored = bool(self.asked.fields.get("store"))
        """Whether the response is stored, or is going to be."""
        self._reducer = Reducer(context.choices[0], self.asked.unique)
        self._model = context.model
        self._tokenizer = context.tokenizer
        self._status = "queued"
        self.numbers = 0
        """Number of events so far."""
        self._completed_at: int | None = None
        self._error: dict[str, Any] | None = None
        self._inputs: dict[int, _CustomInput] = {}
        self._done: dict[int, dict[str, Any]] = {}
        """Items that are closed, by place."""
        self._last: Ended | None = None

    def queued(self) -> list[bytes]:
        """Return the events of a response that waits in the background."""
        return [self._lifecycle("response.created"), self._lifecycle("response.queued")]

    def begin(self) -> list[bytes]:
        """Return the events at the beginning of a response; an empty list if it has begun."""
        if self._status != "queued":
            return []
        self._status = "in_progress"
        first = [] if self.numbers else [self._lifecycle("response.created")]
        return [*first, self._lifecycle("response.in_progress")]

    def stream(self, piece: Piece) -> list[bytes]:
        if not self.asked.generate:
            events = self.begin()
            self.add(piece)
            return events
        events = self.begin()
        for happening in self._reducer.feed(piece):
            events += self._events(happening)
        return events

    def end(self) -> list[bytes]:
        self._finish()
        return [self._lifecycle(f"response.{self._status}")]

    def break_off(self, status: Ending, error: dict[str, Any] | None = None) -> list[bytes]:
        """Return the last events of a response that fails, or is cancelled."""
        events = self.begin()
        for happening in self._reducer.close(complete=False):
            events += self._events(happening)
        self._status = status
        self._error = error
        self.ended = True
        return [*events, self._lifecycle("response.failed" if status == "failed" else "response.incomplete")]

    def add(self, piece: Piece) -> None:
        self.begin()
        for happening in self._reducer.feed(piece):
            self._take(happening)

    def whole(self) -> bytes:
        self._finish()
        return orjson.dumps(self.response())

    def response(self) -> dict[str, Any]:
        """Return the response so far."""
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.asked.created_at,
            "completed_at": self._completed_at,
            "status": self._status,
            "incomplete_details": incomplete,
            "error": self._error,
            "model": self._model,
            **self.asked.fields,
            "output": [self._done.get(item.place) or self._item(item, "in_progress") for item in self._shown],
            "usage": self._usage() if self.ended else None,
        }

    @property
    def _shown(self) -> Sequence[Item]:
        return self._reducer.items if self.asked.generate else ()

    def _finish(self) -> None:
        assert self._last is not None, "an answer ended without a piece"
        short = self._last.finish_reason == "length" and self.asked.generate
        self._status = "incomplete" if short else "completed"
        self._completed_at = int(time.time()) if self._status == "completed" else None
        self.ended = True

    def _usage(self) -> dict[str, Any]:
        usage = self._reducer.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.output,
        }

    def _take(self, happening: Happening) -> str:
        """Apply an event, and return the new text of its item."""
        match happening:
            case Added(item, text, _):
                return self._inputs[item.place].feed(text) if item.place in self._inputs else text
            case Opened(item):
                if item.kind == "call" and item.name in self.asked.custom:
                    self._inputs[item.place] = _CustomInput()
            case Closed(item):
                rest = self._inputs[item.place].end() if item.place in self._inputs else ""
                self._done[item.place] = self._item(item, "completed" if item.complete else "incomplete")
                return rest
            case Ended():
                self._last = happening
        return ""

    def _events(self, happening: Happening) -> list[bytes]:
        text = self._take(happening)
        match happening:
            case Opened(item):
                events = [self._of_item("response.output_item.added", item, item=self._item(item, "in_progress"))]
                if item.kind != "call":
                    events.append(self._of_part("response.content_part.added", item, part=_part(item.kind, "", [])))
                return events
            case Added(item, _, logprobs):
                return self._delta(item, text, logprobs) if text else []
            case Closed(item):
                return [*(self._delta(item, text, []) if text else []), *self._closing(item)]
        return []

    def _delta(self, item: Item, text: str, logprobs: Sequence[TokenLogprobs]) -> list[bytes]:
        if item.kind == "text":
            spelled = self._logprobs(logprobs)
            return [self._of_part("response.output_text.delta", item, delta=text, logprobs=spelled)]
        if item.kind == "reasoning":
            return [self._of_part("response.reasoning_text.delta", item, delta=text)]
        kind = "custom_tool_call_input" if item.place in self._inputs else "function_call_arguments"
        return [self._of_item(f"response.{kind}.delta", item, item_id=self._id(item), delta=text)]

    def _closing(self, item: Item) -> list[bytes]:
        done = self._done[item.place]
        if item.kind == "call":
            custom = item.place in self._inputs
            kind, name = ("custom_tool_call_input", "input") if custom else ("function_call_arguments", "arguments")
            content = {"item_id": self._id(item), name: done[name]}
            events = [self._of_item(f"response.{kind}.done", item, **content)]
        else:
            (part,) = done["content"]
            kind = "output_text" if item.kind == "text" else "reasoning_text"
            more = {"logprobs": part["logprobs"]} if item.kind == "text" else {}
            events = [
                self._of_part(f"response.{kind}.done", item, text=part["text"], **more),
                self._of_part("response.content_part.done", item, part=part),
            ]
        return [*events, self._of_item("response.output_item.done", item, item=done)]

    def _item(self, item: Item, status: str) -> dict[str, Any]:
        """Return an item as JSON, with its text only once it is closed."""
        head = {"id": self._id(item), "status": status}
        text = item.text if item.closed else ""
        content = [_part(item.kind, text, self._logprobs(item.logprobs))] if item.closed else []
        if item.kind == "text":
            return {"type": "message", **head, "role": "assistant", "content": content}
        if item.kind == "reasoning":
            sealed = {"encrypted_content": seal(text)} if self.asked.seal and item.closed else {}
            return {"type": "reasoning", **head, "summary": [], "content": content, **sealed}
        called = {"call_id": item.call_id, "name": item.name}
        if (known := self.asked.namespaces.get(item.name)) is not None:
            called["namespace"], called["name"] = known
        if (custom := self._inputs.get(item.place)) is not None:
            return {"type": "custom_tool_call", **head, **called, "input": custom.text if item.closed else ""}
        return {"type": "function_call", **head, **called, "arguments": text}

    def _id(self, item: Item) -> str:
        return PREFIXES["custom" if item.place in self._inputs else item.kind] + item.id

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            self._logprob(entry[0]) | {"top_logprobs": [self._logprob(top) for top in entry[1:]]} for entry in entries
        ]

    def _logprob(self, entry: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.bytes_of(entry.token_id)
        return {"token": raw.decode(errors="replace"), "logprob": entry.logprob, "bytes": list(raw)}

    def _lifecycle(self, name: str) -> bytes:
        return self._event(name, response=self.response())

    def _of_item(self, name: str, of: Item, /, **fields: Any) -> bytes:
        return self._event(name, output_index=of.place, **fields)

    def _of_part(self, name: str, of: Item, /, **fields: Any) -> bytes:
        return self._of_item(name, of, item_id=self._id(of), content_index=0, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self.numbers
        self.numbers += 1
        return orjson.dumps({"type": name, "sequence_number": number, **fields})


class _CustomInput:
    """The text argument of a call of a custom tool, extracted from the call's arguments as they arrive. If these are
    not {"input": "…"}, all of them are the text.
    """

    def __init__(self) -> None:
        self.text = ""
        self._raw = ""
        self._read = 0
        """Number of characters of the arguments that have been read; 0 before the text begins."""

    def feed(self, arguments: str) -> str:
        """Return the new part of the text."""
        self._raw += arguments
        if not self._read:
            if (begin := _INPUT.match(self._raw)) is None:
                return ""
            self._read = begin.end()
        found = _WHOLE.match(self._raw, self._read)
        assert found is not None, "it matches nothing, too"
        self._read = found.end()
        new: str = json.loads(f'"{found[0]}"', strict=False)
        self.text += new
        return new

    def end(self) -> str:
        """Return the rest of the text, at the end of the arguments."""
        try:
            arguments = json.loads(self._raw)
        except ValueError:
            arguments = None
        text = arguments.get("input") if isinstance(arguments, dict) else None
        if isinstance(text, str):  # which may have half a surrogate pair
            rest = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")[len(self.text) :]
        else:
            rest = "" if self._read else self._raw
        self.text += rest
        return rest


def seal(text: str) -> str:
    """Return a text as clients keep it in `encrypted_content`. It is encoded, not encrypted, because it belongs to the
    client."""
    return urlsafe_b64encode((_SEALED + text).encode(errors="surrogatepass")).decode()


def unseal(sealed: str) -> str | None:
    """Return the text of `encrypted_content`; None if it was not sealed by this server."""
    try:
        text = urlsafe_b64decode(sealed.encode()).decode(errors="surrogatepass")
    except ValueError:
        return None
    return text.removeprefix(_SEALED) if text.startswith(_SEALED) else None


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
