"""Blocks that other replicas may read, and for how long."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from engine.embedded.handoff.remote_source import RemoteSource
from engine.embedded.handoff.state import Layout, held_of
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.embedded.step import Chunk
from engine.transfer.base import LeaseWord
from engine.types import Held

EARLY_TOKENS = 512
"""Minimum number of prompt tokens between two early handoffs, each of which is a message through four processes."""


class _ReadableBlocks(NamedTuple):
    word: LeaseWord
    """Tells other replicas that the blocks are still valid."""
    held: Held
    """Location of the blocks, as it was last announced."""


class Leases:
    """The blocks of sequences whose prompt is computed here for another replica: from the end of the prompt until the
    sequence is aborted, or early, while the prompt is being computed."""

    def __init__(self, replicas: RemoteSource | None, layout: Layout, *, early: bool) -> None:
        """`replicas` move blocks; None if there are none, and then no prompt is computed for them. `early`: whether
        blocks stay where they are while a prompt is computed, as they do without sliding windows."""
        self._replicas = replicas
        self._layout = layout
        self._early = early
        self._leases: dict[Sequence, _ReadableBlocks] = {}
        self._written: dict[Sequence, int] = {}
        """Running sequences that are read early, and the number of their tokens whose keys and values are in their
        blocks: computed by steps that have ended."""

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """Note which sequences of a step are to be read early."""
        for chunk in chunks:
            sequence, request = chunk.sequence, chunk.sequence.request
            if (
                request.prefill_only
                and request.early_handoff
                and request.sampling.max_tokens > 1
                and self._early
                and sequence not in self._leases
            ):
                self._written.setdefault(sequence, 0)

    def note_written(self, chunks: Iterable[Chunk]) -> None:
        """Note that the step of these chunks has ended."""
        for chunk in chunks if self._written else ():
            if chunk.sequence in self._written and chunk.current:
                self._written[chunk.sequence] = chunk.start + chunk.length

    def announce(self) -> list[tuple[Sequence, Held]]:
        """Return sequences that are read early, with the location of their blocks and the number of computed tokens: at
        once, and then after every `EARLY_TOKENS`."""
        announced: list[tuple[Sequence, Held]] = []
        for sequence, written in self._written.items():
            said = self._leases.get(sequence)
            if said is None or written >= said.held.computed + EARLY_TOKENS:
                word, held = said or self._grant(sequence)
                held = replace(held, computed=written)
                self._leases[sequence] = _ReadableBlocks(word, held)
                announced.append((sequence, held))
        return announced

    def hold(self, sequence: Sequence) -> Held:
        """Return the location of the blocks of a sequence whose prompt is computed."""
        self._written.pop(sequence, None)
        lease = self._leases.get(sequence) or self._grant(sequence)
        return Held(lease.held.state)

    def take_back(self) -> list[tuple[Sequence, Held]]:
        """Revoke the early leases of preempted sequences, whose blocks the next step may write to; return these
        sequences, each with a location that says that nothing can be read."""
        lost = [sequence for sequence in self._written if sequence.status is not SequenceStatus.RUNNING]
        for sequence in lost:
            self.revoke(sequence)
        return [(sequence, Held(b"")) for sequence in lost]

    def revoke(self, sequence: Sequence) -> None:
        """Tell other replicas that the blocks of a sequence, if they read them, are not what they were. To be called
        before anything writes to them."""
        self._written.pop(sequence, None)
        if (lease := self._leases.pop(sequence, None)) is not None:
            assert self._replicas is not None
            self._replicas.words.revoke(lease.word)

    def _grant(self, sequence: Sequence) -> _ReadableBlocks:
        assert self._replicas is not None, "the engine refuses prefills without transfers"
        word = self._replicas.words.grant()
        held = held_of(self._layout, sequence.tables, self._replicas.transfers.offers(), word)
        lease = self._leases[sequence] = _ReadableBlocks(word, held)
        return lease
