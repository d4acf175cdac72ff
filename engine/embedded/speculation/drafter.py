"""The seam between the engine and what guesses the next tokens of a sequence."""

from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from engine.embedded.models.runner import ModelRunner
from engine.embedded.sequence import Sequence

CLASSES = 5
"""Classes of confidence. How often their tokens are right is measured, so a drafter only has to order them."""


class Draft(NamedTuple):
    """Tokens that may come next, in order."""

    tokens: list[int]
    classes: list[int]
    """For each token its class of confidence, given that those before it are right: 0 is the lowest."""


NOTHING = Draft([], [])


class Drafter(Protocol):
    """Proposes tokens for sequences that decode. What it proposes changes how soon tokens come, and never which.

    It follows a sequence through `sequence.tokens`, which only grow, from the first call of `draft` to `forget`.
    """

    free: bool
    """Whether a draft costs next to nothing. If so, it is also made to measure how often it would have been right;
    otherwise only as long as it is worth while."""

    @property
    def runner(self) -> ModelRunner | None:
        """The model that drafts, if one does."""
        ...

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[Draft]:
        """Return a draft for each sequence, of at most `limits[i]` tokens, one at least, to follow its known tokens."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Give up what is kept for a sequence that has ended; it may be unknown here."""
        ...


def class_of_match(length: int) -> int:
    """Return the class of a token that follows a match of so many tokens."""
    return min(max(length.bit_length() - 2, 0), CLASSES - 1)
