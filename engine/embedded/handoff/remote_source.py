"""Another replica as a source of KV blocks."""

from collections.abc import Callable
from contextlib import suppress

from engine.embedded.handoff.state import Layout, check_early, check_handoff, decode_state, reads_of
from engine.embedded.handoff.words import LeaseWords
from engine.embedded.kv.groups import Table
from engine.embedded.sequence import Sequence
from engine.errors import EngineUnavailable
from engine.transfer.base import QueuedTransfer, Read, Transfer, TransferError
from engine.transfer.transfers import Transfers
from engine.types import Handoff

_MOST_FOLLOWED = 256 << 20
"""Maximum number of bytes that the device waits for before it computes anything else, which holds up all sequences:
about a millisecond by NVLink."""


class _RemoteReading:
    """Transfers of KV blocks, each of what the other replica has computed by then, and after the last blocks of the
    word that tells whether all of them were still held.

    Where a GPU can wait for the last ones, nothing here does: what they are for is computed behind them, and the word
    is looked at before the result is used.
    """

    def __init__(self, source: "RemoteSource", sequence: Sequence, missing: list[list[int]]) -> None:
        assert sequence.remote is not None
        self.num_bytes = 0
        self.seconds = 0.0
        self._source = source
        self._words = source.words
        self._sequence = sequence
        self._remote = sequence.remote
        self._tables: list[Table] = sequence.tables
        self._missing = missing
        self._transfer: Transfer | None = None
        self._word: Read | None = None
        """The read of the word, once it has begun."""
        self._followed: QueuedTransfer | None = None
        """The transfer of the last blocks, if the device waits for it before it computes anything else."""
        self._cancelled = False
        self._read_on()

    @property
    def waits(self) -> bool:
        return self._transfer is None

    def done(self) -> bool:
        if self._followed is not None:
            return True
        if self._transfer is not None and not self._ended(self._transfer):
            return False
        if self._word is not None or self._cancelled:
            return True
        self._read_on()
        return self._followed is not None

    def confirmed(self, *, wait: bool = False) -> bool:
        if self._transfer is not None:
            if wait and self._followed is not None:
                self._followed.wait()
            if not self._ended(self._transfer):
                return False
        if self._word is not None and not self._words.outlived(self._remote.lease, self._word):
            raise TransferError("the other replica gave them up before they had been read")
        return True

    def _ended(self, transfer: Transfer) -> bool:
        if not transfer.done():
            return False
        self.seconds += transfer.seconds
        self._transfer = None
        return True

    def cancel(self) -> None:
        self._cancelled = True
        if self._transfer is not None:
            self._transfer.cancel()

    def _read_on(self) -> None:
        """Read the blocks that are computed and have not been read yet, if there are any; at the end the word too."""
        sequence, layout = self._sequence, self._remote.layout
        last = not sequence.lacks_first
        count = sequence.readable // layout.block_size
        now = self._missing if last else [[index for index in group if index < count] for group in self._missing]
        if not last and not any(now):
            return
        self._missing = [[index for index in group if index >= count] for group in self._missing]
        reads = reads_of(self._remote, self._tables, now)
        size = sum(read.size for read in reads)
        self.num_bytes += size
        if last:
            self._word = self._words.read(self._remote.lease, len(layout.block_bytes))
            reads.append(self._word)
        transfers, offers = self._source.transfers, self._remote.offers
        if (queued := transfers.queue(offers, reads)) is None:
            threaded = self._transfer = transfers.read(offers, reads)
            threaded.future.add_done_callback(lambda _: self._source.wake())
            return
        self._transfer = queued
        # A processor may keep state, and must not see logits that do not count.
        if self._word is not None and size <= _MOST_FOLLOWED and not sequence.sampler.processors:
            with suppress(TransferError):  # the device is broken
                self._words.follow(queued, self._word)
                self._followed = queued


class RemoteSource:
    """The replica that computes a sequence's prompt (`Sequence.remote`): it offers all of the prompt, once."""

    is_transfer = True

    def __init__(self, transfers: Transfers, words: LeaseWords) -> None:
        self.transfers = transfers
        self.words = words
        self.wake: Callable[[], None] = lambda: None
        """Called in another thread when a transfer has ended, so that nobody has to poll for that."""

    def offer(self, sequence: Sequence) -> int:
        return sequence.num_prompt if sequence.remote is not None else 0

    def read(self, sequence: Sequence, missing: list[list[int]]) -> _RemoteReading:
        return _RemoteReading(self, sequence, missing)

    def release(self, sequence: Sequence) -> None:
        sequence.remote = None


def resume(sequence: Sequence, handoff: Handoff, layout: Layout) -> None:
    """Make a new sequence continue from a handoff. Raises InvalidRequest if the handoff is wrong or cannot be
    continued, EngineUnavailable if the prefill replica has another layout than this one."""
    if handoff.early:
        check_early(sequence.request, handoff)
    first = None if handoff.early else check_handoff(sequence.request, handoff, layout)
    if handoff.state:  # else the blocks are lost
        sequence.remote = decode_state(handoff.state, layout, sequence.num_prompt)
    sequence.prompt_logprobs, sequence.reported = None, True
    if first is None:
        sequence.lacks_first, sequence.pending, sequence.readable = True, 1, handoff.computed
    else:
        _take_first(sequence, first)


def resume_further(sequence: Sequence, handoff: Handoff, layout: Layout) -> None:
    """Have a sequence with an early handoff continue from a later one. Raises as `resume` does."""
    assert sequence.lacks_first and sequence.request.handoff is not None
    if handoff.state != sequence.request.handoff.state:
        raise EngineUnavailable("the prefill replica has given up the KV blocks that were being read")
    if handoff.early:
        sequence.readable = max(sequence.readable, handoff.computed)
        return
    first = check_handoff(sequence.request, handoff, layout)
    sequence.lacks_first, sequence.pending = False, 0
    _take_first(sequence, first)


def _take_first(sequence: Sequence, token_id: int) -> None:
    sequence.sampler.resume(token_id)
    sequence.tokens.append(token_id)
