"""The seam of parsers, and the parser of models whose output is plain text."""

from collections.abc import Callable, Sequence
from typing import Protocol

from multimodal.answers.parts import Part, Text
from multimodal.text.tokenizer import Tokenizer


class Parser(Protocol):
    """Finds the parts in the output of one choice.

    It gets the output as it comes, after detokenising and stop strings: `text` may lag behind `token_ids`, and may lack
    special tokens. A parser may hold text back until it knows what it is part of; parts are never taken back.
    """

    def feed(self, token_ids: Sequence[int], text: str) -> list[Part]:
        """Return the parts that the next output completes or continues."""
        ...

    def finish(self) -> list[Part]:
        """Return what was held back. Nothing more comes."""
        ...


ParserFactory = Callable[[Tokenizer], Parser]
"""Return the parser of one choice."""


class PlainText:
    """All output is text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pass

    def feed(self, token_ids: Sequence[int], text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []
