"""The parts of an answer. Parsers find them in a model's output; shapes turn them into JSON."""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the model's reasoning before the answer; `tokens` counts the tokens that made it."""

    text: str
    tokens: int = 0


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool, or the next piece of one: the first has id and name, all have some of the arguments' JSON."""

    index: int
    """Index of the call in its choice."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = Text | Reasoning | ToolCall


class Parser(Protocol):
    """Finds the parts in the output of one choice.

    It gets the output incrementally, after detokenising and stop strings: `text` may lag behind `token_ids`, and may
    lack special tokens. A parser may hold text back until its kind is clear; parts are never taken back.
    """

    malformed: int
    """Calls that began and never completed."""

    def feed(self, token_ids: Sequence[int], text: str) -> list[Part]:
        """Return the parts that the next output completes or continues."""
        ...

    def finish(self) -> list[Part]:
        """Return the parts that were held back. The output has ended."""
        ...
