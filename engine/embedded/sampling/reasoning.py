"""The budget of reasoning as a mask, by which every runner's sampler forces the end of reasoning."""

from __future__ import annotations

import torch

from engine.embedded.grammar.compiler import Matcher
from engine.embedded.grammar.library import Compiled, Position
from engine.kit.reasoning import ReasoningProgress
from engine.types import ReasoningBudget


class ReasoningMatcher:
    """A matcher that also follows a budget of reasoning; `guide` is the matcher of the request's guide, if it has one.

    What the guide forbids is not forced.
    """

    def __init__(self, budget: ReasoningBudget, guide: Matcher | None) -> None:
        self._progress = ReasoningProgress(budget)
        self._guide = guide

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return "" if self._guide is None else self._guide.error

    def begin(self, compiled: Compiled) -> None:
        """Start at the beginning of the guide's grammar."""
        assert self._guide is not None, "only a guide has a grammar"
        self._guide.begin(compiled)

    @property
    def shared(self) -> Position | None:
        """See `Matcher`."""
        return None if self._guide is None else self._guide.shared

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        """Clear bits in `row` of a bitmask that allows every id. See `Matcher`."""
        if self._guide is not None:
            self._guide.fill(bitmask, row)
        self._force(bitmask, row)

    def filled(self, bitmask: torch.Tensor, row: int, *, empty: bool, slow: bool = False) -> None:
        """See `Matcher`."""
        assert self._guide is not None
        self._guide.filled(bitmask, row, empty=empty, slow=slow)
        self._force(bitmask, row)

    def _force(self, bitmask: torch.Tensor, row: int) -> None:
        bits, forced = bitmask.numpy().view("uint32")[row], self._progress.forced
        if forced is not None and bits[forced // 32] >> forced % 32 & 1:
            bits[:] = 0
            bits[forced // 32] = 1 << forced % 32
        for token_id in self._progress.avoided:
            bits[token_id // 32] &= ~(1 << token_id % 32) & 0xFFFFFFFF

    def allows(self, token_id: int) -> bool:
        """See `Matcher`."""
        forced = self._progress.forced
        if token_id in self._progress.avoided or (forced not in (None, token_id) and self._fits(forced)):
            return False
        return self._fits(token_id)

    def _fits(self, token_id: int) -> bool:
        """Return whether the guide, if there is one, allows a token."""
        return self._guide is None or self._guide.allows(token_id)

    def accept(self, token_id: int) -> bool:
        """See `Matcher`."""
        self._progress.accept(token_id)
        return self._guide is None or self._guide.accept(token_id)
