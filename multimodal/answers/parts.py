"""What an answer consists of. Parsers make parts of a model's output; the shapes turn them into JSON."""

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of what the model thinks before it answers; `tokens` counts the tokens that made it."""

    text: str
    tokens: int = 0


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool, or the next piece of one: the first piece has id and name, all have some of the arguments' JSON text."""

    index: int
    """Which call of the choice, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = Text | Reasoning | ToolCall
