"""Words in shared memory by which a replica that has read another's KV blocks knows that they were valid all the while.

Beside the KV blocks lies a table of words, in memory that other replicas read in the same way. A replica that holds
blocks for another writes a random word into its table, and removes it before it gives the blocks up. The other replica
reads the blocks first and the word afterwards: if the word is still there, so were the blocks. Clocks, delayed messages
and suspended processes make no difference.
"""

import secrets

import torch

from engine.embedded.kv.memory import region_of, shared_zeros
from engine.transfer.base import WORD_BYTES, LeaseWord, QueuedTransfer, Read, Region

_PLACES = 1 << 14
"""Places for our own words, and again as many for words that are read. Both are taken in turn: one that is
overwritten counts as lost."""


class LeaseWords:
    """The table of words, owned by the engine's thread. On a GPU it has a stream of its own, so that words do not wait
    for a step.

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
        self._on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        """Words that the device has copied here; 0 for others."""
        self._granted = self._read = 0

    @property
    def region(self) -> Region:
        return region_of(self._words)

    def grant(self) -> LeaseWord:
        """Write a word that stays until `revoke`."""
        lease = LeaseWord(self._granted % _PLACES, 1 + secrets.randbelow((1 << 63) - 1))
        self._granted += 1
        self._put(lease.place, lease.word)
        return lease

    def revoke(self, lease: LeaseWord) -> None:
        """Remove a word; to be called before the blocks are given up."""
        if self._get(lease.place) == lease.word:
            self._put(lease.place, 0)

    def read(self, lease: LeaseWord, region: int) -> Read:
        """Return a reader of another replica's word, in the region of the table."""
        place = _PLACES + self._read % _PLACES
        self._read += 1
        self._on_host[place] = 0
        return Read(region, lease.place * WORD_BYTES, place * WORD_BYTES, WORD_BYTES)

    def follow(self, transfer: QueuedTransfer, read: Read) -> None:
        """Have the device begin what it is given from now on after a transfer, the last read of which is a word's, and
        after copying that word to the host. Raises TransferError."""
        offset = read.local_offset
        transfer.copy(self._on_host.data_ptr() + offset, self._words.data_ptr() + offset, WORD_BYTES)
        transfer.hold_back(torch.cuda.current_stream(self._words.device).cuda_stream)

    def outlived(self, lease: LeaseWord, read: Read) -> bool:
        """Return whether the word was still there when it was read, by a transfer that has ended."""
        place = read.local_offset // WORD_BYTES
        return int(self._on_host[place]) == lease.word or self._get(place) == lease.word

    def _put(self, place: int, word: int) -> None:
        with torch.cuda.stream(self._stream):
            self._words[place] = word
        if self._stream is not None:
            self._stream.synchronize()

    def _get(self, place: int) -> int:
        with torch.cuda.stream(self._stream):
            return int(self._words[place].item())
