"""Another replica as a source of KV blocks."""

from dataclasses import dataclass

from engine.embedded.handoff.state import Layout, check_handoff, decode_state, reads_of
from engine.embedded.handoff.words import LeaseWords
from engine.embedded.sequence import Sequence
from engine.transfer.base import LeaseWord, Read, Transfer, TransferError
from engine.transfer.transfers import Transfers
from engine.types import Handoff


@dataclass(frozen=True, slots=True)
class _RemoteReading:
    """A transfer of KV blocks, and after them of the word that tells whether they were still held."""

    transfer: Transfer
    num_bytes: int
    words: LeaseWords
    lease: LeaseWord
    word: Read

    def done(self) -> bool:
        if not self.transfer.done():
            return False
        if not self.words.outlived(self.lease, self.word):
            raise TransferError("the other replica gave them up before they had been read")
        return True

    def cancel(self) -> None:
        self.transfer.cancel()


class RemoteSource:
    """The replica that has computed a sequence's prompt (`Sequence.remote`): it offers all of the prompt, once."""

    is_transfer = True

    def __init__(self, transfers: Transfers, words: LeaseWords) -> None:
        self.transfers = transfers
        self.words = words

    def offer(self, sequence: Sequence) -> int:
        return sequence.num_prompt if sequence.remote is not None else 0

    def read(self, sequence: Sequence, missing: list[list[int]]) -> _RemoteReading:
        remote = sequence.remote
        assert remote is not None
        reads = reads_of(remote, sequence.tables, missing)
        word = self.words.read(remote.lease, len(remote.layout.block_bytes))
        transfer = self.transfers.read(remote.offers, [*reads, word])
        return _RemoteReading(transfer, sum(read.size for read in reads), self.words, remote.lease, word)

    def release(self, sequence: Sequence) -> None:
        sequence.remote = None


def resume(sequence: Sequence, handoff: Handoff, layout: Layout) -> None:
    """Make a new sequence continue from a handoff. Raises InvalidRequest if the handoff is wrong or cannot be
    continued, EngineUnavailable if the prefill replica has another layout than this one."""
    first = check_handoff(sequence.request, handoff, layout)
    if handoff.state:  # else the blocks are lost
        sequence.remote = decode_state(handoff.state, layout, sequence.num_prompt)
    sequence.sampler.resume(first)
    sequence.tokens.append(first)
    sequence.prompt_logprobs, sequence.reported = None, True
