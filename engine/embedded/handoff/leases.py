"""How a replica that has read another's KV blocks knows that they were held all the while, whatever came to pass meanwhile.

Beside the KV blocks lies a table of words, in memory that peers read in the same way. Whoever holds blocks for a peer writes a random word
into it, and takes it away before the blocks are given up. The peer reads the blocks first and the word afterwards: if it is still there,
so were the blocks. Clocks, messages under way and processes that stood still have no part in this.
"""

import secrets

import msgspec
import torch

from engine.embedded.kv.memory import region_of, shared_zeros
from engine.transfer.base import Read, Region

_PLACES = 1 << 14
"""For our own words, and again as many for those that are read. Both are taken in turn: one that is overwritten is taken for lost."""
_BYTES = 8


class Lease(msgspec.Struct, frozen=True, array_like=True):
    place: int
    word: int


class Leases:
    """The table, owned by the engine's thread. On a GPU a stream of its own keeps words from waiting for a step.

    Its region must be the last one, since a transfer reads the regions in their order.
    """

    def __init__(self, device: torch.device) -> None:
        shape = (2 * _PLACES,)
        self._words = (
            shared_zeros(shape, torch.int64)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=torch.int64, device=device)
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._granted = self._read = 0

    @property
    def region(self) -> Region:
        return region_of(self._words)

    def grant(self) -> Lease:
        """From now on, until `revoke`."""
        lease = Lease(self._granted % _PLACES, 1 + secrets.randbelow((1 << 63) - 1))
        self._granted += 1
        self._put(lease.place, lease.word)
        return lease

    def revoke(self, lease: Lease) -> None:
        """To be called before the blocks are given up."""
        if self._get(lease.place) == lease.word:
            self._put(lease.place, 0)

    def read(self, lease: Lease, region: int) -> Read:
        """What reads a peer's word, in the table's region."""
        place = _PLACES + self._read % _PLACES
        self._read += 1
        return Read(region, lease.place * _BYTES, place * _BYTES, _BYTES)

    def outlived(self, lease: Lease, read: Read) -> bool:
        """Whether the lease was valid when its word was read."""
        return self._get(read.local_offset // _BYTES) == lease.word

    def _put(self, place: int, word: int) -> None:
        with torch.cuda.stream(self._stream):
            self._words[place] = word
        if self._stream is not None:
            self._stream.synchronize()

    def _get(self, place: int) -> int:
        with torch.cuda.stream(self._stream):
            return int(self._words[place].item())
