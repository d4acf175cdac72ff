"""Embeddings that stay in the memory of the tower's device until engines of the host have read them: by CUDA IPC from
a GPU, else by shared memory.

They are kept for the first readers as long as the lease says, and after that until their memory is needed for newer
ones: a front that remembers where they are can use them again. A lease word beside them tells a reader whether what it
read was still theirs.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch
from msgspec.structs import replace

from engine.embedded.handoff.words import LeaseWords
from engine.embedded.kv.memory import region_of, shared_zeros
from engine.errors import EmbeddingsLost
from engine.kit.tasks import all_of
from engine.media import MediaSpan, MediaSpans, RemoteRows
from engine.transfer.arena import Arena, Place, Places, private_copy
from engine.transfer.base import LeaseWord, TransferError
from engine.transfer.shared_bytes import Data
from engine.transfer.transfers import Transfers
from engine.types import GenerateRequest

log = logging.getLogger(__name__)


@dataclass
class _Kept:
    place: Place
    lease: LeaseWord
    until: float
    """Time until which nothing else may take the place."""


class KeptRows:
    """`size` bytes for embeddings, on a GPU for readers by CUDA IPC, else in shared memory. Thread-safe.

    A place that nobody releases is leased for `seconds`. Raises TransferError if other processes cannot read such
    memory.
    """

    def __init__(self, size: int, device: torch.device, seconds: float) -> None:
        on_host = device.type == "cpu"
        shape = (size,)
        self._memory = (
            shared_zeros(shape, torch.uint8) if on_host else torch.zeros(shape, dtype=torch.uint8, device=device)
        )
        self._words = LeaseWords(device)
        self._places = Places(size)
        self._seconds = seconds
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        """By offset, the oldest first."""
        self._lock = Lock()
        regions = [region_of(self._memory), self._words.region]
        self._transfers = Transfers(regions, "shared_memory" if on_host else "cuda_ipc")

    def put(self, rows: torch.Tensor) -> RemoteRows | None:
        """Keep a copy of rows. Return None if there is no room beside those that are leased."""
        if rows.nbytes > len(self._memory):
            return None
        with self._lock:
            place = self._take(rows.nbytes)
            if place is None:
                return None
            to = self._memory[place.offset : place.offset + place.size]
            to.copy_(rows.contiguous().view(torch.uint8).flatten())
            if rows.is_cuda:
                torch.cuda.current_stream(rows.device).synchronize()
            kept = _Kept(place, self._words.grant(), time.monotonic() + self._seconds)
            self._kept[place.offset] = kept
            return RemoteRows(self._transfers.offers(), place.offset, place.size, kept.lease)

    def copied(self, rows: RemoteRows) -> torch.Tensor | None:
        """Return a copy of what is kept, bytes on the host; None if it is not there any more."""
        with self._lock:
            kept = self._kept.get(rows.offset)
            if kept is None or kept.lease != rows.lease:
                return None
            return self._memory[rows.offset : rows.offset + kept.place.size].to("cpu", copy=True)

    def release(self, rows: RemoteRows) -> None:
        """End the lease of rows. Those of an earlier process, or that are no longer here, are none of ours."""
        with self._lock:
            kept = self._kept.get(rows.offset)
            if kept is not None and kept.lease == rows.lease:
                kept.until = 0.0

    def _take(self, size: int) -> Place | None:
        while (place := self._places.take(size)) is None:
            now = time.monotonic()
            oldest = next((kept for kept in self._kept.values() if kept.until <= now), None)
            if oldest is None:
                return None
            del self._kept[oldest.place.offset]
            self._words.revoke(oldest.lease)
            self._places.free(oldest.place)
        return place


class RowsReader:
    """Reads such embeddings in the process of an engine, each within `seconds`, through `size` bytes of memory that are
    taken at the first. On a GPU the copy engine brings them to the host, where no step waits for them and from where
    they can be computed again.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds
        self._opening = asyncio.Lock()
        self._arena: Arena | None = None

    async def fetched(self, request: GenerateRequest, device: str) -> GenerateRequest:
        """Return a request with its embeddings. Raises EmbeddingsLost, unless it may do without."""
        spans = await all_of(self._fetched(span, torch.device(device), request) for span in request.spans)
        return replace(request, media=MediaSpans(tuple(spans)))

    async def read(self, rows: RemoteRows, device: torch.device) -> Data:
        """Return embeddings. Raises TransferError, and OSError without memory to read them into."""
        if rows.size > self._size:
            raise TransferError(f"{rows.size} bytes do not fit into EMBEDDING_MEMORY_MB")
        async with self._opening:
            if self._arena is None:
                self._arena = await asyncio.to_thread(partial(_arena, self._size, device))
        arena = self._arena
        (data,) = await arena.read(rows.offers, rows.offset, [rows.size], self._seconds, rows.lease, private_copy)
        return data

    async def close(self) -> None:
        if self._arena is not None:
            await self._arena.close()

    async def _fetched(self, span: MediaSpan, device: torch.device, request: GenerateRequest) -> MediaSpan:
        if span.remote is None:
            return span
        try:
            return replace(span, data=await self.read(span.remote, device), remote=None)
        except (TransferError, OSError) as error:
            if request.handoff is None:
                raise EmbeddingsLost(f"embeddings cannot be read in their encoder's memory: {error}") from error
            # They are needed only if the keys and values of the prompt are lost, too.
            log.warning("no embeddings for request %s: %s", request.request_id, error)
            return replace(span, remote=None)


def _arena(size: int, device: torch.device) -> Arena:
    """Raises TransferError and OSError."""
    if device.type == "cpu":
        return Arena(size, "shared_memory")
    return Arena(size, "cuda_ipc", device=device.index or 0)
