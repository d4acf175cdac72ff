"""The host tier: a second pool of KV blocks, in memory of the host, and the copies between it and the engine's device.

On a GPU the memory is pinned, write-combined if nothing but the copy engine reads it, and copies run on streams of
their own. On a CPU it is plain memory.
"""

import ctypes
import mmap
from collections import OrderedDict
from collections.abc import Iterator, KeysView, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from engine.embedded.kv.blocks import BlockKey
from engine.embedded.kv.memory import populate
from engine.transfer.cuda import Cuda

ALIGNMENT = 4096
"""Alignment of slots in bytes, as direct I/O needs it."""
Name = tuple[int, BlockKey]
"""A block: its group of layers and its key."""


def padded(size: int) -> int:
    """Return a size rounded up to whole units of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class CopyPoint(Protocol):
    """The copies that a thread had begun at some moment."""

    def wait(self) -> None:
        """Wait until they have ended."""
        ...

    def hold_back(self, stream: int) -> None:
        """Have the device begin what a CUDA stream is given from now on after they have ended; does not wait."""
        ...

    def close(self) -> None: ...


class Copies(Protocol):
    """Copies of one thread between addresses of the device and of the host."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Begin a copy; does not wait."""
        ...

    def point(self) -> CopyPoint:
        """Return the copies begun so far."""
        ...

    def wait(self) -> None:
        """Wait until all copies have ended."""
        ...


class Device:
    """The engine's device, as tiers see it: it allocates memory of the host for copies, and makes them."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        self._cuda = Cuda() if device.type == "cuda" else None
        self._maps: list[mmap.mmap] = []
        self._pinned: list[int] = []

    def allocate(self, size: int, *, write_combined: bool = False) -> int:
        """Return the address of new, aligned memory that stays until `close`. The processor should not read
        write-combined memory: that is slow. Raises OSError and TransferError."""
        if self._cuda is None:
            # Private, since shared pages take longer to get, and small: for large ones a busy system moves others.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._maps.append(memory)
            return ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with self._cuda.on(self._index):
            self._pinned.append(self._cuda.allocate_host(size, write_combined=write_combined))
        return self._pinned[-1]

    def close(self) -> None:
        """Free all memory; nothing may copy any more."""
        self._maps.clear()
        if self._cuda is not None:
            with self._cuda.on(self._index):
                while self._pinned:
                    self._cuda.free_host(self._pinned.pop())

    def hold_back(self, points: Sequence[CopyPoint]) -> None:
        """Have what is computed from now on begin after copies have ended; does not wait. For the engine's thread."""
        if self._cuda is not None:
            with self._cuda.on(self._index):
                for point in points:
                    point.hold_back(torch.cuda.current_stream(self._index).cuda_stream)

    def copies(self) -> AbstractContextManager[Copies]:
        """Return the copies of a thread. They have ended when the block ends."""
        return _memmoves() if self._cuda is None else self._on_stream(self._cuda)

    @contextmanager
    def _on_stream(self, cuda: Cuda) -> Iterator[Copies]:
        with cuda.on(self._index), cuda.stream() as stream:
            yield stream


class _Memmove:
    """Copies on a CPU, which end at once, and every point of them."""

    def copy(self, to: int, source: int, size: int) -> None:
        populate(to, size)
        ctypes.memmove(to, source, size)

    def point(self) -> CopyPoint:
        return self

    def hold_back(self, stream: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def _memmoves() -> Iterator[Copies]:
    yield _Memmove()


class Slot:
    """Room for one block. Its contents do not change while it is pinned."""

    __slots__ = ("address", "pins", "ready")

    def __init__(self, address: int) -> None:
        self.address = address
        self.pins = 0
        self.ready = False
        """Whether its block has been copied here."""


class HostTier:
    """Slots for blocks of every group, the least recently requested replaced first. Owned by the engine's thread."""

    def __init__(self, counts: Sequence[int], block_bytes: Sequence[int], address: int) -> None:
        """`address` is that of memory for `counts` slots of each group, one group after the other."""
        self.counts = tuple(counts)
        """Number of slots of each group."""
        self._free: list[list[Slot]] = []
        self._slots: list[OrderedDict[BlockKey, Slot]] = [OrderedDict() for _ in counts]
        for count, size in zip(counts, block_bytes, strict=True):
            self._free.append([Slot(address + number * padded(size)) for number in reversed(range(count))])
            address += count * padded(size)

    def __contains__(self, name: Name) -> bool:
        slot = self._slots[name[0]].get(name[1])
        return slot is not None and slot.ready

    def __len__(self) -> int:
        return sum(map(len, self._slots))

    def keys(self, group: int) -> KeysView[BlockKey]:
        """Return the keys of a group's blocks, the least recently requested first."""
        return self._slots[group].keys()

    def has(self, name: Name) -> bool:
        """Return whether a block is here or on its way."""
        return name[1] in self._slots[name[0]]

    def touch(self, name: Name) -> None:
        """Note that a block has been requested."""
        group, key = name
        if key in self._slots[group]:
            self._slots[group].move_to_end(key)

    def take(self, name: Name) -> tuple[Slot | None, BlockKey | None]:
        """Return a pinned slot for a block that is not here, and the key of the block that had to give it up.

        There is no slot if all are pinned."""
        group, key = name
        assert key not in self._slots[group], "a block has one slot"
        evicted = None
        if self._free[group]:
            slot = self._free[group].pop()
        else:
            evicted = next((old for old, slot in self._slots[group].items() if not slot.pins), None)
            if evicted is None:
                return None, None
            slot = self._slots[group].pop(evicted)
        slot.pins, slot.ready = 1, False
        self._slots[group][key] = slot
        return slot, evicted

    def pin(self, name: Name) -> Slot:
        """Keep a block until `unpin`."""
        slot = self._slots[name[0]][name[1]]
        slot.pins += 1
        return slot

    def unpin(self, name: Name, slot: Slot) -> None:
        """Give up what `take` or `pin` returned; a slot whose block has been dropped meanwhile is free then."""
        slot.pins -= 1
        if not slot.pins and self._slots[name[0]].get(name[1]) is not slot:
            self._free[name[0]].append(slot)

    def drop(self, name: Name) -> None:
        """Forget a block."""
        slot = self._slots[name[0]].pop(name[1])
        if not slot.pins:
            self._free[name[0]].append(slot)

    def clear(self) -> None:
        """Forget all blocks."""
        for group, slots in enumerate(self._slots):
            for key in list(slots):
                self.drop((group, key))

    def audit(self) -> None:
        """Assert that no slot is lost, given that nothing is pinned."""
        for group, count in enumerate(self.counts):
            slots = [*self._free[group], *self._slots[group].values()]
            assert len({id(slot) for slot in slots}) == len(slots) == count, "a slot is lost or listed twice"
            assert not any(slot.pins for slot in slots), "a slot is pinned"
