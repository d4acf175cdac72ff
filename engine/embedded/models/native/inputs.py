"""Inputs of a step for `decoder.cpp`, but for weights and cache. Small steps use the same memory each time.

A step of one row reads all weights, so that nothing else is in a cache behind it: each function of NumPy or torch takes
10 to 60 µs then instead of one, and so does a new page of memory. So few are called, on the same memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.embedded.models.rotary import Rotary

_TABLE = 1 << 13
"""Number of positions whose cosines and sines are kept: 4 MiB for heads of 128 values, for each kind of rotary
positions. Steps behind more tokens take longer anyway."""
_FEW = 64
"""Number of rows of logits up to which steps use the same memory."""


class CosinesAndSines(NamedTuple):
    """The cosines and sines of a step's rotary positions."""

    cos: int
    """Address of the cosines, float32 [kinds of rotary positions, `size`, head_dim / 2]."""
    sin: int
    indices: Sequence[int]
    """For each position, the index of its cosines and sines."""
    size: int


class StepInputs:
    """Inputs of a step by their addresses, which are valid until the next step, and its logits."""

    def __init__(self, rotaries: Sequence[Rotary], context_length: int, vocab_size: int) -> None:
        self._rotaries = rotaries
        self._known = min(context_length, _TABLE)
        self._table, self._own = self._compute(range(self._known)), np.empty(0, np.float32)
        """Cosines and sines of the first positions, and those of the last step that had positions behind them."""
        self._known_at = _halves(self._table)
        self._vocab_size = vocab_size
        self._logits = torch.empty(_FEW, vocab_size)
        self._rows: dict[int, torch.Tensor] = {}
        """The first rows of `logits`, by their number."""
        self._write_to(1 << 10)

    def _write_to(self, count: int) -> None:
        self._values = np.empty(count, np.int32)
        self._address = self._values.ctypes.data

    def write(self, *parts: Sequence[int]) -> list[int]:
        """Write integers as int32, one part behind the other; return the address of each part."""
        values = [value for part in parts for value in part]
        if len(values) > len(self._values):
            self._write_to(2 * len(values))
        self._values[: len(values)] = values
        addresses, address = [], self._address
        for part in parts:
            addresses.append(address)
            address += 4 * len(part)
        return addresses

    def turns(self, positions: Sequence[int]) -> CosinesAndSines:
        """Return the cosines and sines for these positions."""
        if max(positions) < self._known:
            return CosinesAndSines(*self._known_at, positions, self._known)
        self._own = self._compute(positions)
        return CosinesAndSines(*_halves(self._own), range(len(positions)), len(positions))

    def logits(self, rows: int) -> torch.Tensor:
        """Return room for the logits of so many rows, float32 [rows, vocab]: for few rows the same each time, for more
        the caller's own."""
        if rows > _FEW:
            return torch.empty(rows, self._vocab_size)
        if (found := self._rows.get(rows)) is None:
            found = self._rows[rows] = self._logits[:rows]
        return found

    def _compute(self, positions: Sequence[int]) -> NDArray[np.float32]:
        """Return cosines and sines, [2, kinds of rotary positions, positions, head_dim / 2]."""
        return np.stack([rotary.turns(positions) for rotary in self._rotaries], axis=1)


def _halves(turns: NDArray[np.float32]) -> tuple[int, int]:
    """Return the addresses of the cosines and of the sines."""
    return turns[0].ctypes.data, turns[1].ctypes.data
