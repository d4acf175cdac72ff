"""Which sequences run in the next step, and with how many tokens each.

Running sequences come first: decodes (one token each), then the rest of started prompts, then waiting sequences, all within one budget
of tokens and in order of rank. A sequence is admitted when blocks for all its present tokens are there, or for its first chunk and the
window in layers of a sliding window; it takes further ones as it goes on, and when none is left the running sequence of the last rank is
preempted: it gives its blocks back and waits to be recomputed, mostly from the prefix cache.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from engine.embedded.groups import BlockGroups, Table
from engine.embedded.sequence import Sequence

PROMPT_LOGPROB_TOKENS = 256
"""Most tokens in a step for a sequence whose prompt log-probabilities are wanted: each needs a row of logits."""


class Chunk(NamedTuple):
    """`tokens[start : start + length]` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    """Whether the step reaches the last token, so that the next one is sampled."""
    starts: int
    """The sequence's, when the chunk was made."""

    @classmethod
    def next_of(cls, sequence: Sequence, length: int) -> "Chunk":
        start = sequence.computed
        return cls(sequence, start, length, start + length == sequence.length, sequence.starts)

    @property
    def current(self) -> bool:
        """Whether the sequence still has what the chunk computed."""
        return self.sequence.starts == self.starts and self.sequence.slot >= 0


class Scheduler:
    """Owns the waiting and the running list; the groups own the blocks."""

    def __init__(self, blocks: BlockGroups, *, max_num_seqs: int, max_num_tokens: int, chunked_prefill: bool) -> None:
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        """In order of rank."""
        self.running: list[Sequence] = []
        """In order of rank."""
        self.preemptions = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._chunked = chunked_prefill

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its rank."""
        bisect.insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished or aborted sequence and free its blocks."""
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._slots.append(sequence.slot)
            sequence.slot = -1
        else:
            self.waiting.remove(sequence)
        self.blocks.release(sequence.tables)
        sequence.tables = []

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, taken as computed from now on; empty when all that runs waits for its last pending token."""
        preempted = self.preemptions
        prompts: list[Sequence] = []
        chunks: list[Chunk] = []
        for sequence in list(self.running):  # decodes first
            if sequence.remaining > 1:
                prompts.append(sequence)
            elif not sequence.spent and sequence.slot >= 0 and len(chunks) < self._max_num_tokens and self._grow(sequence, 1):
                chunks.append(Chunk.next_of(sequence, 1))
        budget = self._max_num_tokens - len(chunks)
        for sequence in prompts:
            if sequence.slot >= 0 and (length := self._length(sequence, budget, chunks)) and self._grow(sequence, length):
                chunks.append(Chunk.next_of(sequence, length))
                budget -= length
        if preempted != self.preemptions:
            chunks = [chunk for chunk in chunks if chunk.current]
        elif self.waiting:
            self._admit(budget, chunks)
        for chunk in chunks:
            chunk.sequence.computed = chunk.start + chunk.length
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """A step has written the keys and values of a chunk: its full blocks become reusable, and those behind a window are given back."""
        sequence, end = chunk.sequence, chunk.start + chunk.length
        full = end // self.blocks.block_size
        if (full <= sequence.stored and not self.blocks.sliding) or not chunk.current:
            return
        if full > sequence.stored:
            keys = sequence.extend_keys(self.blocks.block_size)[:full]
            self.blocks.store(sequence.tables, keys, sequence.tokens, sequence.stored)
            sequence.stored = full
        self.blocks.leave_behind(sequence.tables, end)

    def audit(self) -> None:
        """Assert that every block is accounted for."""
        self.blocks.audit([sequence.tables for sequence in (*self.running, *self.waiting)])

    def _length(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """The largest chunk of the sequence that the budget allows; 0 if none fits. Unchunked, a long prompt may run alone."""
        remaining = min(sequence.remaining, self.blocks.max_chunk)
        if self._chunked:
            return min(remaining, budget, PROMPT_LOGPROB_TOKENS if sequence.wants_prompt_logprobs else budget)
        return remaining if remaining <= budget or not chunks else 0

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Give the sequence blocks for its next `count` tokens, preempting others of a later rank, or itself, when there are none."""
        end = sequence.computed + count
        if end <= len(sequence.tables[-1]) * self.blocks.block_size:  # no other table is shorter
            return True
        while not self.blocks.grow(sequence.tables, sequence.length, end):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.computed = sequence.stored = 0
        self.preemptions += 1
        self.add(sequence)

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        for sequence in self._candidates():
            if budget <= 0 or len(self.running) >= self._max_num_seqs:
                return
            matched = self._match(sequence)
            sequence.computed = len(matched[0]) * self.blocks.block_size
            length = self._length(sequence, budget, chunks)
            # One spare block for each running sequence, or admitting would soon preempt what it admits.
            spare = len(self.running)
            fits = not spare or self.blocks.fits(matched, sequence.length, sequence.computed + length, spare)
            if not length or not fits:
                sequence.computed = 0
                return
            self._start(sequence, matched, length)
            chunks.append(Chunk.next_of(sequence, length))
            budget -= length

    def _start(self, sequence: Sequence, matched: list[Table], length: int) -> None:
        self.blocks.hold(matched, sequence.length)
        sequence.tables, sequence.stored = matched, len(matched[0])
        grown = self.blocks.grow(sequence.tables, sequence.length, sequence.computed + length)
        assert grown, "alone, every sequence fits"
        if not sequence.num_output:
            sequence.cached_tokens = sequence.computed
        sequence.slot = self._slots.pop()
        sequence.starts += 1
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_rank)

    def _match(self, sequence: Sequence) -> list[Table]:
        """Reusable blocks of its prefix. At least one token is always computed, for its logits; all of them, if all are reported."""
        size = self.blocks.block_size
        usable = 0 if sequence.wants_prompt_logprobs else (len(sequence.tokens) - 1) // size
        return self.blocks.match(sequence.extend_keys(size)[:usable])

    def _candidates(self) -> Iterator[Sequence]:
        """Waiting sequences in order, without those whose next block a running prompt is computing just now: they wait to share it."""
        size = self.blocks.block_size
        prompts = [s for s in self.running if s.stored < s.num_prompt // size] if self.blocks.reuse else []
        coming = {key for s in prompts for key in s.extend_keys(size)[s.stored :]}
        for sequence in list(self.waiting):
            keys = sequence.extend_keys(size)[: (len(sequence.tokens) - 1) // size]
            if not sequence.wants_prompt_logprobs and any(key in coming for key in keys):
                continue
            yield sequence
            if self.blocks.reuse and sequence.tables:
                coming.update(keys[sequence.stored :])


def _rank(sequence: Sequence) -> float:
    return sequence.rank
