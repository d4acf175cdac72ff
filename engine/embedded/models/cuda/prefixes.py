"""Prefixes that running sequences share: equal block ids at the start of their tables, and so the same keys. Needs
NumPy alone."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

LEAST_TOKENS = 1024
"""Minimum number of tokens of a prefix that is worth a pass of its own."""
LEAST_SEQUENCES = 8


class SharedPrefix(NamedTuple):
    """Tokens that the tables of some sequences of a step begin with."""

    rows: list[int]
    tokens: int


class SharedPrefixes:
    """Finds shared prefixes, whenever other sequences run than before."""

    def __init__(self, tables: NDArray[np.int32], block_size: int) -> None:
        """`tables`: the block table of each slot, int32 [slots, blocks]; its owner keeps it up to date."""
        self._tables = tables
        self._size = block_size
        self._running: tuple[list[int], list[int]] = ([], [])
        self._found: list[SharedPrefix] = []

    def most(self, decodes: int) -> int:
        """Return how many prefixes so many decodes may share."""
        return decodes // LEAST_SEQUENCES

    def changed(self, slots: Sequence[int], admissions: Sequence[int]) -> bool:
        """Return whether other sequences run than `find` was asked about last."""
        return self._running != (list(slots), list(admissions))

    def find(self, slots: Sequence[int], admissions: Sequence[int], positions: Sequence[int]) -> list[SharedPrefix]:
        """Return the prefixes that these decodes share, none of which has the token at a sequence's position. It is the
        same for later positions of the same admissions, as tables only grow."""
        if self.changed(slots, admissions):
            self._running = list(slots), list(admissions)
            self._found = self._search(np.array(slots), np.array(positions))
            if self._found:
                shown = ", ".join(f"{len(prefix.rows)} x {prefix.tokens}" for prefix in self._found)
                log.debug("sequences x tokens of shared prefixes: %s", shown)
        return self._found

    def _search(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> list[SharedPrefix]:
        least = -(-LEAST_TOKENS // self._size)
        long_enough = np.flatnonzero(positions >= least * self._size)
        if len(long_enough) < LEAST_SEQUENCES:
            return []
        found = []
        ids = self._tables[slots[long_enough], least - 1]
        for block, count in zip(*np.unique(ids, return_counts=True), strict=True):
            if count < LEAST_SEQUENCES:
                continue
            alike = np.flatnonzero(ids == block)
            most = int(positions[long_enough[alike]].min()) // self._size
            candidates = self._tables[:, :most][slots[long_enough[alike]]]
            same = candidates == candidates[0]
            together = same[:, :least].all(1)
            if together.sum() < LEAST_SEQUENCES:
                continue
            different = np.flatnonzero(~same[together].all(0))
            blocks = int(different[0]) if len(different) else most
            found.append(SharedPrefix(long_enough[alike[together]].tolist(), blocks * self._size))
        return found
