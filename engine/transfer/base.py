"""What moving bytes between the memory of processes is made of: regions, reads, offers, and the errors.

A replica has the same regions, in the same order, as its peers. The owner of bytes makes an `Offer` of them, which travels in the handoff;
whoever holds it reads. Nothing is ever written into a peer's memory.
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


class TransferError(Exception):
    """The bytes did not arrive, or not all of them; the sentence says why."""


class NotFromHere(TransferError):
    """This offer cannot be taken from this process; nothing was touched, and another offer may work."""


class Region(NamedTuple):
    """Memory that peers may read. `device` is -1 for host memory, else a CUDA ordinal of this process; `size` in bytes."""

    address: int
    size: int
    device: int


class Read(NamedTuple):
    """`size` bytes from `remote_offset` of the peer's region to `local_offset` of ours with the same index."""

    region: int
    remote_offset: int
    local_offset: int
    size: int


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """How a peer may read our regions; `data` is the method's own."""

    method: str
    data: bytes


class Transfer(Protocol):
    def done(self) -> bool:
        """Whether it has ended; polled, never waits. True or an error means that local memory is touched no more.

        Raises TransferError when it failed or was cancelled.
        """

    def cancel(self) -> None:
        """Ask it to end early; `done` has to be polled until it has."""


class TransferMethod(Protocol):
    """One way to move bytes. `read` may be called by several threads at once, `close` when none runs any more."""

    def offer(self) -> Offer:
        """The same on every call."""

    def read(self, data: bytes, reads: Sequence[Read], cancelled: Event) -> None:
        """Waits until the bytes are here. `reads` are within our regions; whether they are within the peer's is checked here.

        The regions are read in the order in which `reads` has them, each when the one before is here.

        Raises NotFromHere before anything is touched, TransferError for all else; memory is touched no more in either case.
        """

    def close(self) -> None: ...


class Recent(Generic[K, V]):
    """What is known of peers, those put last: others make room. For any thread."""

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
    """What a method's offer says of the owner. Raises NotFromHere."""
    try:
        return msgspec.msgpack.decode(data, type=owner)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotFromHere(f"the offer cannot be read: {error}") from error


def join_reads(reads: Sequence[Read]) -> list[Read]:
    """The same bytes in the fewest reads: sorted by their place here, those joined that are adjacent on both sides. Empty ones vanish."""
    joined: list[Read] = []
    for read in sorted((read for read in reads if read.size), key=_place):
        last = joined[-1] if joined else None
        if last and _end(last) == (read.region, read.remote_offset, read.local_offset):
            joined[-1] = last._replace(size=last.size + read.size)
        else:
            joined.append(read)
    return joined


def split_reads(reads: Sequence[Read], most: int) -> list[Read]:
    """The same bytes in reads of at most `most` bytes each, in the same order."""
    return [
        Read(read.region, read.remote_offset + start, read.local_offset + start, min(most, read.size - start))
        for read in reads
        for start in range(0, read.size, most)
    ]


def check_local(reads: Sequence[Read], regions: Sequence[Region]) -> None:
    """Raises TransferError unless all lie within our regions and no two write the same bytes."""
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
    """Raises TransferError unless all lie within the peer's regions of these sizes."""
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
