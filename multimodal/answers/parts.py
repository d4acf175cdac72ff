"""The parts of an answer. Parsers find them in a model's output; shapes turn them into JSON."""

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
    """Which call of the choice, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = Text | Reasoning | ToolCall
