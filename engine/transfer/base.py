"""The vocabulary of moving bytes between processes: regions, reads, offers and errors.

All replicas have the same regions in the same order. The owner of the bytes describes them by `Offer`s, which travel in
the handoff, and the receiver of an offer reads them. Nothing is ever written into another process's memory.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from threading import Event, Lock
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

PEERS_REMEMBERED = 256
"""Entries of a `Recent`."""


class TransferError(Exception):
    """Some or all of the bytes did not arrive; the message says why."""


class NotFromHere(TransferError):
    """The offer cannot be used from this process. No memory was changed, and another offer may work."""


class Region(NamedTuple):
    """Memory that peers may read: `size` bytes. `device` is -1 for host memory, else a CUDA ordinal of this process."""

    address: int
    size: int
    device: int
    pinned: bool = False
    """Whether this is pinned memory of the host, into which `device` copies what peers have. Peers cannot read it."""


class Read(NamedTuple):
    """`size` bytes from `remote_offset` of the peer's region to `local_offset` of ours with the same index."""

    region: int
    remote_offset: int
    local_offset: int
    size: int


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """An offer to peers to read our regions by one method, which defines the format of `data`."""

    method: str
    data: bytes


class LeaseWord(msgspec.Struct, frozen=True, array_like=True):
    """A word that is in its owner's table of words as long as something is held for a reader. The reader reads it after
    the bytes: if it is still there, the bytes were what was held."""

    place: int
    """Its index in the table, which is the owner's last region."""
    word: int


WORD_BYTES = 8


class Transfer(Protocol):
    """A read in progress."""

    seconds: float
    """Duration of the transfer; 0 until it has ended."""

    def done(self) -> bool:
        """Whether the transfer has ended; never blocks. True or an error means that local memory is no longer written.

        Raises TransferError if the transfer failed or was cancelled.
        """

    def cancel(self) -> None:
        """Ask the transfer to end early; poll `done` until it has."""


class QueuedTransfer(Transfer, Protocol):
    """A read of which a GPU has been given all copies."""

    def wait(self) -> None:
        """Block until `done` would tell."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy between addresses of our own memory after that. Raises TransferError."""

    def hold_back(self, stream: int) -> None:
        """Have the work that a CUDA stream is given from now on begin after all copies; does not block. Raises
        TransferError."""


class TransferMethod(Protocol):
    """One way to move bytes.

    Several threads may call `read` at once; `close` is called when none of them runs any more.
    """

    @property
    def offer(self) -> Offer:
        """The offer of our regions; never changes."""

    def read(self, data: bytes, reads: Sequence[Read], cancelled: Event) -> None:
        """Copy a peer's bytes; block until they are here.

        The caller has checked that `reads` lie within our regions; this checks the peer's.

        Regions are read in the order of `reads`, each after the one before is complete.

        Raises NotFromHere before any memory is written, and TransferError for all other failures; after either, memory
        is no longer written.
        """

    def close(self) -> None:
        """Free the method's resources."""


class Recent(Generic[K, V]):
    """A map of facts about peers that keeps the PEERS_REMEMBERED newest entries. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > PEERS_REMEMBERED:
                self._values.popitem(last=False)


def decode_offer(data: bytes, owner: type[T]) -> T:
    """Decode the data of an offer. Raises NotFromHere."""
    try:
        return msgspec.msgpack.decode(data, type=owner)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotFromHere(f"the offer cannot be read: {error}") from error


def join_reads(reads: Sequence[Read]) -> list[Read]:
    """Return the same bytes in the fewest reads.

    They are sorted by local offset, joined where adjacent on both sides, and never empty.
    """
    joined: list[Read] = []
    for read in sorted((read for read in reads if read.size), key=_place):
        last = joined[-1] if joined else None
        if last and _end(last) == (read.region, read.remote_offset, read.local_offset):
            joined[-1] = last._replace(size=last.size + read.size)
        else:
            joined.append(read)
    return joined


def split_reads(reads: Sequence[Read], most: int) -> list[Read]:
    """Return the same bytes in reads of at most `most` bytes each, in the same order."""
    return [
        Read(read.region, read.remote_offset + start, read.local_offset + start, min(most, read.size - start))
        for read in reads
        for start in range(0, read.size, most)
    ]


def check_local(reads: Sequence[Read], regions: Sequence[Region]) -> None:
    """Check reads. Raises TransferError unless all lie within our regions and no two write the same bytes."""
    for read in reads:
        if not 0 <= read.region < len(regions):
            raise TransferError(f"there is no region {read.region}; there are {len(regions)}")
        if min(read.size, read.local_offset, read.remote_offset) < 0:
            raise TransferError(f"{read} has a negative offset or size")
        if read.local_offset + read.size > (size := regions[read.region].size):
            raise TransferError(f"{read} ends beyond this process's region of {size} bytes")
    placed = sorted((read.region, read.local_offset, read.size) for read in reads if read.size)
    for (region, start, size), (other, following, _) in pairwise(placed):
        if region == other and start + size > following:
            raise TransferError(f"two reads write the same bytes, at {following} of region {region}")


def check_remote(reads: Sequence[Read], sizes: Sequence[int]) -> None:
    """Check reads. Raises TransferError unless all lie within the peer's regions, which have these sizes."""
    for read in reads:
        if read.region >= len(sizes):
            raise TransferError(f"the peer has no region {read.region}; it has {len(sizes)}")
        if read.remote_offset + read.size > sizes[read.region]:
            raise TransferError(f"{read} ends beyond the peer's region of {sizes[read.region]} bytes")


def check_cancelled(cancelled: Event) -> None:
    if cancelled.is_set():
        raise TransferError("cancelled")


def _place(read: Read) -> tuple[int, int]:
    return read.region, read.local_offset


def _end(read: Read) -> tuple[int, int, int]:
    return read.region, read.remote_offset + read.size, read.local_offset + read.size
