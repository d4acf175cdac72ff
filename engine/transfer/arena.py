"""Host memory that peers may read, allocated in pieces.

Encode replicas put embeddings there, and the replicas that need them read them into arenas of their own.
"""

import asyncio
import ctypes
import mmap
from bisect import insort
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from engine.kit.work import PYTHON
from engine.transfer.base import Offer, Read, Region, Transfer, TransferError
from engine.transfer.shared_bytes import Data, shared_or_copied
from engine.transfer.shared_memory import shared_memory
from engine.transfer.transfers import MethodName, Transfers

_ALIGNMENT = 4096
_POLL_SECONDS = 0.001


class Place(NamedTuple):
    """`size` bytes from `offset` of the arena."""

    offset: int
    size: int


class Arena:
    """`size` bytes of shared memory with a first-fit allocator. The system provides memory when it is first used.

    Everything but the copying runs on one event loop. Raises TransferError and OSError as `Transfers` does.
    """

    def __init__(self, size: int, method: MethodName = "auto", port: int = 0) -> None:
        self._pages = shared_memory(size)
        self._memory = (ctypes.c_char * size).from_buffer(self._pages)
        self._address = ctypes.addressof(self._memory)
        self._transfers = Transfers([Region(self._address, size, -1)], method, port)
        self._free = [Place(0, size)]
        self._taken: set[Place] = set()
        self._room = asyncio.Event()
        self._orphans: set[asyncio.Task[list[Data]]] = set()
        self._closing: asyncio.Task[None] | None = None
        self.offers: tuple[Offer, ...] = self._transfers.offers()
        """Offers by which peers read the arena, which is region 0."""

    @property
    def taken(self) -> list[Place]:
        """Allocated places, sorted."""
        return sorted(self._taken)

    async def take(self, size: int, seconds: float) -> Place | None:
        """Allocate `size` bytes, to be freed by `free`; return None if there is no room for `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while (place := self._take(size)) is None:
                    self._room.clear()
                    await self._room.wait()
                return place
        except TimeoutError:
            return None

    def free(self, place: Place) -> None:
        """Free a place; nothing may read or write it any more."""
        self._taken.remove(place)
        insort(self._free, Place(place.offset, _aligned(place.size)))
        joined: list[Place] = []
        for part in self._free:
            if joined and joined[-1].offset + joined[-1].size == part.offset:
                part = Place(joined[-1].offset, joined.pop().size + part.size)
            joined.append(part)
        self._free = joined
        self._room.set()

    def trim(self) -> None:
        """Give the memory of places that are free back to the system."""
        for part in self._free:
            self._pages.madvise(mmap.MADV_REMOVE, part.offset, part.size)

    def write(self, place: Place, parts: Sequence[bytes | memoryview]) -> None:
        """Write the parts one after the other into `place`, without the GIL."""
        assert sum(map(len, parts)) <= place.size and place in self._taken, "bytes for another place"
        address = self._address + place.offset
        for part in parts:
            source = part if isinstance(part, bytes) else (ctypes.c_char * len(part)).from_buffer(part)
            ctypes.memmove(address, source, len(part))
            address += len(part)

    async def read(self, offers: Sequence[Offer], offset: int, sizes: Sequence[int], seconds: float) -> list[Data]:
        """Return a peer's bytes from `offset` of its arena, in parts of these sizes.

        Raises TransferError, also after `seconds`.
        """
        place = await self.take(sum(sizes), seconds)
        if place is None:
            raise TransferError(f"no room for {sum(sizes)} bytes")
        try:
            transfer = self._transfers.read(offers, [Read(0, offset, place.offset, place.size)])
        except TransferError:
            self.free(place)
            raise
        copying = asyncio.create_task(self._copied(transfer, place, sizes))
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

    async def _copied(self, transfer: Transfer, place: Place, sizes: Sequence[int]) -> list[Data]:
        try:
            while not transfer.done():  # noqa: ASYNC110 - it is polled
                await asyncio.sleep(_POLL_SECONDS)
            return await PYTHON.run(lambda: self._parts(place, sizes))
        finally:
            self.free(place)

    def _parts(self, place: Place, sizes: Sequence[int]) -> list[Data]:
        ends = accumulate(sizes, initial=place.offset)
        return [shared_or_copied(memoryview(self._memory)[start:end]) for start, end in pairwise(ends)]

    def _take(self, size: int) -> Place | None:
        wanted = _aligned(size)
        for index, part in enumerate(self._free):
            if part.size >= wanted:
                rest = Place(part.offset + wanted, part.size - wanted)
                self._free[index : index + 1] = [rest] if rest.size else []
                place = Place(part.offset, size)
                self._taken.add(place)
                return place
        return None


def _aligned(size: int) -> int:
    return max(-(-size // _ALIGNMENT), 1) * _ALIGNMENT
