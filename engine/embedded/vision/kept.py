"""Embeddings that stay in the memory of the tower's device until engines of the host have read them.

They are kept for the first readers as long as the lease says, and after that until their memory is needed for newer
ones: a front that remembers where they are can use them again. A lease word beside them tells a reader whether what it
read was still theirs.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

import torch

from engine.embedded.handoff.words import LeaseWords
from engine.embedded.kv.memory import region_of, shared_zeros
from engine.media import RemoteRows
from engine.transfer.arena import Place, Places
from engine.transfer.base import LeaseWord
from engine.transfer.transfers import Transfers


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
