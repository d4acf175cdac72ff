"""The seam between the engine and what guesses the next tokens of a sequence."""

from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from engine.embedded.models.runner import ModelRunner, StepInput
from engine.embedded.sequence import Sequence

CLASSES = 10
"""Classes of confidence: five of matches in earlier text, five of what a model expects. How often their tokens are
right is measured, so a drafter only has to order them."""


class Draft(NamedTuple):
    """Tokens that may come next, in order."""

    tokens: list[int]
    classes: list[int]
    """Confidence class of each token, given that the tokens before it are right; 0 is the lowest."""


NOTHING = Draft([], [])


@runtime_checkable
class HiddenStatesReader(Protocol):
    """A drafter that reads the model's hidden states."""

    def read(self, step: StepInput, hidden: torch.Tensor) -> None:
        """Read the hidden states [tokens, size] of a step's tokens. The next step may overwrite them."""
        ...

    def skip(self) -> None:
        """Note that those of some steps will not be read."""
        ...


class Drafter(Protocol):
    """Proposes tokens for sequences that decode. What it proposes changes how soon tokens come, and never which.

    It follows a sequence through `sequence.tokens`, which only grow, from the first call of `draft` to `forget`.
    """

    free: bool
    """Whether a draft costs next to nothing: earlier text is looked up. If so, it is also made to measure how often it
    would have been right; otherwise only as long as it is worth while."""

    @property
    def runner(self) -> ModelRunner | None:
        """The model that drafts, if one does."""
        ...

    def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
        """Return a draft for each sequence, of at most `limits[i]` tokens, one at least, to follow its known tokens.
        A drafter that costs ends a draft that is less likely right than `least`."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended; the sequence may be unknown here."""
        ...


_BOUNDS = (0.3, 0.5, 0.7, 0.9)
"""Probabilities that separate the classes of what a model expects."""


def class_of_probability(value: float) -> int:
    """Return the class of a token that a model expects so surely."""
    return CLASSES // 2 + sum(value >= bound for bound in _BOUNDS)


_CLASSES_OF_MATCHES = [min(max(length.bit_length() - 2, 0), CLASSES // 2 - 1) for length in range(1 << CLASSES // 2)]
"""By the tokens of a match; longer ones are of the last class."""


def classes_of_match(length: int, count: int) -> list[int]:
    """Return the classes of tokens that follow a match of this many tokens."""
    known = _CLASSES_OF_MATCHES[length : length + count]
    return known + _CLASSES_OF_MATCHES[-1:] * (count - len(known))
