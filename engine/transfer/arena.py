"""Memory that is allocated in pieces: host memory that peers may read, or into which a GPU copies what peers have.

Encode replicas put embeddings there, and the replicas that need them read them into arenas of their own.
"""

import asyncio
import ctypes
import mmap
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import accumulate, count, pairwise
from typing import NamedTuple
from weakref import finalize

from engine.kit.work import PYTHON
from engine.transfer.base import WORD_BYTES, LeaseWord, Offer, Read, Region, TransferError
from engine.transfer.cuda import Cuda
from engine.transfer.shared_bytes import Data, shared_or_copied
from engine.transfer.shared_memory import shared_memory
from engine.transfer.transfers import MethodName, Transfers

_ALIGNMENT = 4096
_WORDS = _ALIGNMENT // WORD_BYTES


class Place(NamedTuple):
    """`size` bytes from `offset` of the memory."""

    offset: int
    size: int


class Places:
    """A first-fit allocator of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.gaps = [Place(0, size)]
        """Free places, sorted."""
        self.taken: set[Place] = set()

    def take(self, size: int) -> Place | None:
        """Allocate `size` bytes; return None if there is no room."""
        wanted = _aligned(size)
        for index, gap in enumerate(self.gaps):
            if gap.size >= wanted:
                rest = Place(gap.offset + wanted, gap.size - wanted)
                self.gaps[index : index + 1] = [rest] if rest.size else []
                place = Place(gap.offset, size)
                self.taken.add(place)
                return place
        return None

    def free(self, place: Place) -> None:
        self.taken.remove(place)
        insort(self.gaps, Place(place.offset, _aligned(place.size)))
        joined: list[Place] = []
        for gap in self.gaps:
            if joined and joined[-1].offset + joined[-1].size == gap.offset:
                gap = Place(joined[-1].offset, joined.pop().size + gap.size)
            joined.append(gap)
        self.gaps = joined


class Arena:
    """`size` bytes of shared memory. The system provides memory when it is first used.

    With `device`, a CUDA ordinal, it is pinned memory instead: this GPU copies there what peers have in GPU memory, and
    no peer can read it.

    Everything but the copying runs on one event loop. Raises TransferError and OSError as `Transfers` does.
    """

    def __init__(self, size: int, method: MethodName = "auto", port: int = 0, device: int = -1) -> None:
        self._pages = [shared_memory(part) for part in (size, _ALIGNMENT)] if device < 0 else []
        self._memory, words = (
            [(ctypes.c_char * len(pages)).from_buffer(pages) for pages in self._pages]
            if device < 0
            else [_pinned(part, device) for part in (size, _ALIGNMENT)]
        )
        self._words = (ctypes.c_uint64 * _WORDS).from_buffer(words)
        """Lease words that were read; a place that is used again too early counts as a lost lease."""
        self._turns = count()
        self._address = ctypes.addressof(self._memory)
        regions = [
            Region(ctypes.addressof(part), ctypes.sizeof(part), device, device >= 0) for part in (self._memory, words)
        ]
        self._transfers = Transfers(regions, method, port)
        self._places = Places(size)
        self._room = asyncio.Event()
        self._orphans: set[asyncio.Task[list[Data]]] = set()
        self._closing: asyncio.Task[None] | None = None
        self.offers: tuple[Offer, ...] = self._transfers.offers()
        """Offers by which peers read the arena, which is region 0."""

    @property
    def taken(self) -> list[Place]:
        """Allocated places, sorted."""
        return sorted(self._places.taken)

    async def take(self, size: int, seconds: float) -> Place | None:
        """Allocate `size` bytes, to be freed by `free`; return None if there is no room for `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while (place := self._places.take(size)) is None:
                    self._room.clear()
                    await self._room.wait()
                return place
        except TimeoutError:
            return None

    def free(self, place: Place) -> None:
        """Free a place; nothing may read or write it any more."""
        self._places.free(place)
        self._room.set()

    def trim(self) -> None:
        """Give shared memory of places that are free back to the system."""
        for gap in self._places.gaps:
            self._pages[0].madvise(mmap.MADV_REMOVE, gap.offset, gap.size)

    def write(self, place: Place, parts: Sequence[bytes | memoryview]) -> None:
        """Write the parts one after the other into `place`, without the GIL."""
        assert sum(map(len, parts)) <= place.size and place in self._places.taken, "bytes for another place"
        address = self._address + place.offset
        for part in parts:
            source = part if isinstance(part, bytes) else (ctypes.c_char * len(part)).from_buffer(part)
            ctypes.memmove(address, source, len(part))
            address += len(part)

    async def read(
        self,
        offers: Sequence[Offer],
        offset: int,
        sizes: Sequence[int],
        seconds: float,
        lease: LeaseWord | None = None,
        copy: Callable[[memoryview], Data] = shared_or_copied,
    ) -> list[Data]:
        """Return a peer's bytes from `offset` of its region 0, in parts of these sizes, each as `copy` makes it.

        Raises TransferError, also after `seconds`, and if a `lease` of the bytes is not in the peer's region 1.
        """
        place = await self.take(sum(sizes), seconds)
        if place is None:
            raise TransferError(f"no room for {sum(sizes)} bytes")
        reads = [Read(0, offset, place.offset, place.size)]
        word = next(self._turns) % _WORDS
        if lease is not None:
            reads.append(Read(1, lease.place * WORD_BYTES, word * WORD_BYTES, WORD_BYTES))
        try:
            transfer = self._transfers.read(offers, reads)
        except TransferError:
            self.free(place)
            raise

        async def copied() -> list[Data]:
            try:
                await asyncio.wrap_future(transfer.future)
                if lease is not None and self._words[word] != lease.word:
                    raise TransferError("they were given up before they had been read")
                return await PYTHON.run(lambda: self._parts(place, sizes, copy))
            finally:
                self.free(place)

        copying = asyncio.create_task(copied())
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(copying)
        except TimeoutError:
            raise TransferError(f"not done after {seconds:g} s") from None
        finally:
            if not copying.done():  # memory may still be written to
                transfer.cancel()
                self._orphans.add(copying)
                copying.add_done_callback(self._orphans.discard)

    async def close(self) -> None:
        """Cancel running reads and wait for them. Idempotent; places stay allocated."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.to_thread(self._transfers.close)
        if self._orphans:
            await asyncio.wait(self._orphans)

    def _parts(self, place: Place, sizes: Sequence[int], copy: Callable[[memoryview], Data]) -> list[Data]:
        ends = accumulate(sizes, initial=place.offset)
        return [copy(memoryview(self._memory)[start:end]) for start, end in pairwise(ends)]


def private_copy(view: memoryview) -> memoryview:
    """Return a copy for this process alone, made without the GIL."""
    copied = bytearray(len(view))
    array = ctypes.c_char * len(view)
    ctypes.memmove(array.from_buffer(copied), array.from_buffer(view), len(view))
    return memoryview(copied)


def _pinned(size: int, device: int) -> "ctypes.Array[ctypes.c_char]":
    """Allocate pinned memory, freed with the array. Raises TransferError."""
    cuda = Cuda()
    with cuda.on(device):
        address = cuda.allocate_host(size, write_combined=False)
    memory = (ctypes.c_char * size).from_address(address)
    finalize(memory, cuda.free_host, address).atexit = False
    return memory


def _aligned(size: int) -> int:
    return max(-(-size // _ALIGNMENT), 1) * _ALIGNMENT
