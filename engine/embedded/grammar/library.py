"""The seam between guided decoding and the libraries that compile grammars: llguidance and xgrammar.

llguidance takes JSON schemas, regular expressions and choices: it compiles them in milliseconds, and computes masks on
demand under limits of its own. xgrammar takes EBNF, whose rules llguidance's lexer would not match character by
character, and structural tags, which are its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.types import Guide

MAX_WHITESPACE = 16
"""Maximum whitespace characters between two JSON tokens.

This is enough for indented output, and stops a model that generates whitespace forever."""

LibraryName = Literal["llguidance", "xgrammar"]
Bitmask = NDArray[np.int32]
"""[rows, ceil(vocab / 32)], contiguous; a set bit allows an id."""


class UnsupportedGuideError(ValueError):
    """The guide cannot be compiled; the message is shown to the user."""


class Setup(msgspec.Struct, frozen=True):
    """Facts of the model that a library needs. `vocab_size` is the model's, padding included."""

    library: LibraryName
    tokenizer_folder: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Position(Protocol):
    """A place in a grammar."""

    @property
    def error(self) -> str:
        """Reason why the output cannot follow the grammar any further, or ""."""

    def fill(self, bitmask: Bitmask, row: int) -> None:
        """Set the bits of the ids that may come next."""

    @property
    def together(self) -> Callable[[Bitmask, Sequence[tuple[Any, int]]], None] | None:
        """Function that fills the bitmask rows of several positions of this class, in several threads; None if the
        library has none."""

    def allows(self, token_id: int) -> bool:
        """Return whether a token that does not end the output may come next. Faster than `fill`."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token that does not end the output. Return False, and stay, if it is not allowed."""

    def may_end(self) -> bool:
        """Return whether the output matches the grammar."""


class Compiled(Protocol):
    """A compiled grammar that any number of sequences can share."""

    num_bytes: int

    def start(self) -> Position:
        """Return the start of the grammar."""


class Library(Protocol):
    """Compiles grammars for one tokenizer.

    A grammar never allows ids without text (padding of the vocabulary, special tokens), except for the end-of-sequence
    ids where the output may end, and special tokens whose text a structural tag has.
    """

    def prepare(self, guide: Guide) -> tuple[Compiled, bytes]:
        """Compile in the worker; return also what makes it quick to `build` in the engine.

        Raises UnsupportedGuideError.
        """

    def build(self, guide: Guide, prepared: bytes) -> Compiled:
        """Compile in the engine what the worker has prepared."""


def library_of(guide: Guide) -> LibraryName:
    """Return the library that compiles a guide."""
    return "xgrammar" if guide.kind in ("grammar", "structural_tag") else "llguidance"


def choices_of(spec: str) -> list[str]:
    """Return the strings of a guide of kind `choice`. Raises UnsupportedGuideError."""
    try:
        choices = json.loads(spec)
    except json.JSONDecodeError:
        raise UnsupportedGuideError("the choices are not valid JSON") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise UnsupportedGuideError("the choices must be a non-empty array of strings")
    if any(0xD800 <= ord(character) < 0xE000 for choice in choices for character in choice):
        raise UnsupportedGuideError("a choice contains half of a surrogate pair")
    return choices


def load(setup: Setup) -> Library:
    """Import a library and have it read the tokenizer, which may take seconds."""
    if setup.library == "llguidance":
        from engine.embedded.grammar.with_llguidance import Llguidance  # noqa: PLC0415

        return Llguidance(setup)
    from engine.embedded.grammar.with_xgrammar import Xgrammar  # noqa: PLC0415

    return Xgrammar(setup)
