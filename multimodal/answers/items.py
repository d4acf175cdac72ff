"""The items of an answer: runs of text, runs of reasoning, and calls, in the order in which the model wrote them.

A `Reducer` turns the pieces of one choice into events about its items. APIs whose answers have items convert these into
their own events, and make the whole answer from the same `Reducer.items`, so that a stream and the whole answer have
equal ids and texts.
"""

import json
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from engine.types import FinishReason, TokenLogprobs
from multimodal.answers.choices import Choice, Piece
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall

ItemKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True, kw_only=True)
class Item:
    """One item, as generated so far. APIs put their own prefixes before its `id`."""

    place: int
    """Index of the item in the answer."""
    id: str
    """Unique among the items of all answers."""
    kind: ItemKind
    pieces: list[str] = field(default_factory=list)
    call_id: str = ""
    """The id that the answer to a call names."""
    name: str = ""
    """The tool that a call is for."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of a text's tokens, if the request wants them."""
    closed: bool = False
    complete: bool = False
    """Whether the model completed it."""

    @property
    def text(self) -> str:
        """The text, the reasoning, or the call's arguments as JSON."""
        return "".join(self.pieces)


class Opened(msgspec.Struct, frozen=True, gc=False):
    """A new item begins. Its text is empty as yet."""

    item: Item


class Added(msgspec.Struct, frozen=True, gc=False):
    """The open item's text goes on by `text`, never empty; `logprobs` are those of its tokens."""

    item: Item
    text: str
    logprobs: list[TokenLogprobs]


class Closed(msgspec.Struct, frozen=True, gc=False):
    """The open item has ended."""

    item: Item


class TokenUsage(msgspec.Struct, frozen=True, gc=False):
    """Numbers of tokens: `cached` of the `prompt`, `reasoning` of the `output`."""

    prompt: int
    cached: int
    output: int
    reasoning: int


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The answer has ended; all its items are closed."""

    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string, or stop token id, that ended it."""
    usage: TokenUsage


Happening = Opened | Added | Closed | Ended


class Reducer:
    """Makes items of the pieces of one choice. At most one item is open at any time, the last."""

    def __init__(self, choice: Choice, unique: str) -> None:
        """The ids of items begin with `unique`, which no other answer has."""
        self.items: list[Item] = []
        self._choice = choice
        self._unique = unique
        self._logprobs: list[TokenLogprobs] = []
        """Log-probabilities of tokens whose text is still pending."""

    @property
    def usage(self) -> TokenUsage:
        """Numbers of tokens up to now."""
        choice = self._choice
        return TokenUsage(choice.prompt_tokens, choice.cached_tokens, choice.completion_tokens, choice.reasoning_tokens)

    def feed(self, piece: Piece) -> list[Happening]:
        """Return the events of the next piece."""
        self._logprobs += piece.logprobs
        found: list[Happening] = []
        for part in piece.parts:
            found += self._take(part)
        if piece.finish_reason is not None:
            found += self.close(complete=piece.finish_reason != "length")
            found.append(Ended(piece.finish_reason, piece.stop_reason, self.usage))
        return found

    def close(self, *, complete: bool) -> list[Happening]:
        """Close the open item, if there is one. A call is complete if its arguments are valid JSON; for other items
        `complete` decides.
        """
        if not self.items or self.items[-1].closed:
            return []
        item = self.items[-1]
        item.closed = True
        item.complete = _is_json(item.text) if item.kind == "call" else complete
        return [Closed(item)]

    def _take(self, part: Part) -> list[Happening]:
        found: list[Happening] = []
        if isinstance(part, ToolCall):
            text = part.arguments
            if part.id is not None:
                found += self._open("call", part.id, part.name or "")
        else:
            text = part.text
            if text:
                found += self._continue(part)
        logprobs: list[TokenLogprobs] = []
        if isinstance(part, Text):
            logprobs = self._logprobs
        if text or not isinstance(part, Text):
            self._logprobs = []
        if text:
            item = self.items[-1]
            item.pieces.append(text)
            item.logprobs += logprobs
            found.append(Added(item, text, logprobs))
        return found

    def _continue(self, part: Text | Reasoning) -> list[Happening]:
        """Open an item for a part, unless it continues the open one."""
        kind: ItemKind = "text" if isinstance(part, Text) else "reasoning"
        if self.items and self.items[-1].kind == kind and not self.items[-1].closed:
            return []
        return self._open(kind)

    def _open(self, kind: ItemKind, call_id: str = "", name: str = "") -> list[Happening]:
        found = self.close(complete=True)
        place = len(self.items)
        item = Item(place=place, id=f"{self._unique}{place:04x}", kind=kind, call_id=call_id, name=name)
        self.items.append(item)
        return [*found, Opened(item)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)  # unlike orjson, it takes numbers of any size
    except (ValueError, RecursionError):
        return False
    return True
