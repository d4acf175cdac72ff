"""How likely drafted tokens are right, as those before them were."""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from engine.embedded.sequence import Sequence
from engine.embedded.speculation.drafter import CLASSES, NOTHING, Draft

_EXPECTED = 2 * (0.2, 0.4, 0.6, 0.8, 0.9)
"""Assumed shares of right tokens, by class, before any was seen."""
_ASSUMED = 4.0
"""Tokens that an assumption counts as."""
_MEMORY_OF_ALL, _MEMORY_OF_ONE = 0.998, 0.95
"""Decay of older observations with each new one of the same class, in the engine and in a sequence."""


class _Shares:
    """Shares of drafted tokens that were right, by class; older observations count less."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._right = [0.0] * CLASSES
        self._seen = [0.0] * CLASSES

    def note(self, kind: int, right: bool) -> None:
        self._right[kind] = self._right[kind] * self._memory + right
        self._seen[kind] = self._seen[kind] * self._memory + 1

    def share(self, kind: int, otherwise: float) -> float:
        """Return the share of a class, drawn towards another one as long as little has been seen."""
        return (self._right[kind] + _ASSUMED * otherwise) / (self._seen[kind] + _ASSUMED)


@dataclass(slots=True)
class _Followed:
    """A sequence that has been drafted for."""

    shares: _Shares
    known: int
    """Its number of tokens when the drafts were made."""
    found: Draft = NOTHING
    """Draft of its next tokens by lookup, whether it was computed or not."""
    modelled: Draft = NOTHING
    """Draft of the same tokens by a model."""


class Acceptance:
    """Compares drafts, computed or not, with the tokens that came, in the engine and in each sequence."""

    def __init__(self) -> None:
        self._all = _Shares(_MEMORY_OF_ALL)
        self._expected = list(_EXPECTED)
        """Shares of right tokens in the engine, by class, as of the last plan."""
        self._followed: dict[Sequence, _Followed] = {}

    def judge(self, sequences: Many[Sequence]) -> None:
        """Compare the last drafts of these sequences with the tokens that have come since."""
        for sequence in sequences:
            if (followed := self._followed.get(sequence)) is None:
                self._followed[sequence] = _Followed(_Shares(_MEMORY_OF_ONE), len(sequence.tokens))
                continue
            if not (came := sequence.tokens[followed.known :]):
                continue
            for draft in (followed.found, followed.modelled):
                for token, drafted, kind in zip(came, *draft, strict=False):
                    self._all.note(kind, token == drafted)
                    followed.shares.note(kind, token == drafted)
                    if token != drafted:
                        break
            followed.found = followed.modelled = NOTHING
            followed.known = len(sequence.tokens)
        self._expected = list(map(self._all.share, range(CLASSES), _EXPECTED))

    def note_found(self, sequence: Sequence, draft: Draft) -> None:
        """Note what lookup drafts for a sequence that was judged."""
        self._followed[sequence].found = draft

    def note_modelled(self, sequence: Sequence, draft: Draft) -> None:
        """Note what a model drafts for a sequence that was judged."""
        self._followed[sequence].modelled = draft

    def chances(self, sequence: Sequence, draft: Draft) -> Iterator[float]:
        """Yield the probabilities that a draft for a sequence that was judged is right up to each of its tokens."""
        own, probability = self._followed[sequence].shares, 1.0
        for kind in draft.classes:
            probability *= own.share(kind, self._expected[kind])
            yield probability

    def forget(self, sequence: Sequence) -> None:
        self._followed.pop(sequence, None)
