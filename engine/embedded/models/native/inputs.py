"""What `decoder.cpp` reads of a step besides weights and cache, in memory that is used again and again.

A step of one row reads all weights, so that nothing else is in a cache behind it: each function of NumPy or torch takes
10 to 60 µs then instead of one, and so does a new page of memory. So few are called, on the same memory.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.embedded.models.rotary import Rotary

_TABLE = 1 << 13
"""Number of positions whose cosines and sines are kept: 4 MiB for heads of 128 values, for each kind of rotary
positions. Steps behind more tokens take longer anyway."""
_FEW = 64
"""Number of rows, and of positions, up to which steps use the same memory."""


class StepInputs:
    """Inputs of a step by their addresses, which are valid until the next step, and its logits."""

    def __init__(self, rotaries: Sequence[Rotary], context_length: int, rows: int, vocab_size: int) -> None:
        self._rotaries = rotaries
        self._known = min(context_length, _TABLE)
        self._tables = [rotary.turns(range(self._known)) for rotary in rotaries]
        """Cosines and sines of the first positions, float32 [positions, head_dim / 2] each."""
        self._most, self._vocab_size = min(rows, _FEW), vocab_size
        self._logits = torch.empty(self._most, vocab_size)
        self._rows: dict[int, torch.Tensor] = {}
        """The first rows of `logits`, by their number."""
        self._rotations: dict[int, _Rotations] = {}
        """Room for the turns of so many positions."""
        self._last: _Rotations | None = None
        """What the last addresses are of."""
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

    def turns(self, positions: Sequence[int]) -> tuple[int, int]:
        """Return the addresses of the cosines and of the sines for these positions, float32 [positions, head_dim / 2]
        for each kind of rotary positions, one behind the other."""
        count = len(positions)
        if (rotations := self._rotations.get(count)) is None:
            rotations = _Rotations(len(self._rotaries), count, self._tables[0][0].shape[1])
            if count <= self._most:
                self._rotations[count] = rotations
        self._last = rotations
        known = max(positions) < self._known
        for rotary, table, out in zip(self._rotaries, self._tables, rotations.parts, strict=True):
            for source, target in zip(table if known else rotary.turns(positions), out, strict=True):
                if known:
                    source.take(positions, axis=0, out=target, mode="clip")
                else:
                    target[:] = source
        return rotations.addresses

    def logits(self, rows: int) -> torch.Tensor:
        """Return room for the logits of so many rows, float32 [rows, vocab]: for few rows the same each time."""
        if rows > self._most:
            return torch.empty(rows, self._vocab_size)
        if (found := self._rows.get(rows)) is None:
            found = self._rows[rows] = self._logits[:rows]
        return found


class _Rotations:
    """Room for the cosines and sines of some positions."""

    def __init__(self, kinds: int, positions: int, half: int) -> None:
        room = np.empty((2, kinds, positions, half), np.float32)
        self.parts = list(zip(*room, strict=True))
        """Cosines and sines, [positions, half] each, of each kind."""
        self.addresses = (room.ctypes.data, room[1].ctypes.data)
