"""Which sequences run in the next step, and with how many tokens each.

Running sequences come first: decodes (one token each), then the rest of started prompts, then waiting sequences, all within one budget
of tokens and in order of rank. A sequence is admitted when blocks for all its present tokens are there; while it decodes it takes a block
at a time, and when none is left the running sequence of the last rank is preempted: it gives its blocks back and waits to be recomputed,
mostly from the prefix cache.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from engine.embedded.blocks import BlockPool
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
    """Owns the waiting and the running list; the pool owns the blocks."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_tokens: int, chunked_prefill: bool) -> None:
        self.pool = pool
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
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, taken as computed from now on; empty when all that runs waits for its last pending token."""
        preempted = self.preemptions
        prompts: list[Sequence] = []
        chunks: list[Chunk] = []
        for sequence in list(self.running):  # decodes first
            if sequence.remaining > 1:
                prompts.append(sequence)
            elif not sequence.spent and sequence.slot >= 0 and len(chunks) < self._max_num_tokens and self._grow(sequence):
                chunks.append(Chunk.next_of(sequence, 1))
        budget = self._max_num_tokens - len(chunks)
        for sequence in prompts:
            if sequence.slot >= 0 and self._grow(sequence) and (length := self._length(sequence, budget, chunks)):
                chunks.append(Chunk.next_of(sequence, length))
                budget -= length
        if self.waiting and preempted == self.preemptions:
            self._admit(budget, chunks)
        for chunk in chunks:
            chunk.sequence.computed = chunk.start + chunk.length
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """A step has written the keys and values of a chunk: its full blocks become reusable."""
        sequence, size = chunk.sequence, self.pool.block_size
        full = (chunk.start + chunk.length) // size
        if full <= sequence.stored or not chunk.current:
            return
        first, keys = sequence.stored, sequence.extend_keys(size)
        chain = [(sequence.blocks[i], keys[i], sequence.tokens[i * size : (i + 1) * size]) for i in range(first, full)]
        self.pool.store(keys[first - 1] if first else None, chain)
        sequence.stored = full

    def audit(self) -> None:
        """Assert that every block is accounted for."""
        self.pool.audit([sequence.blocks for sequence in (*self.running, *self.waiting)])

    def _length(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """The largest chunk of the sequence that the budget allows; 0 if none fits. Unchunked, a long prompt may run alone."""
        if self._chunked:
            return min(sequence.remaining, budget, PROMPT_LOGPROB_TOKENS if sequence.wants_prompt_logprobs else budget)
        return sequence.remaining if sequence.remaining <= budget or not chunks else 0

    def _grow(self, sequence: Sequence) -> bool:
        """Give the sequence blocks for all its tokens, preempting others of a later rank, or itself, when there are none."""
        if sequence.length <= len(sequence.blocks) * self.pool.block_size:
            return True
        while (needed := self._blocks_for(sequence)) > self.pool.available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(needed)
        return True

    def _blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.length // self.pool.block_size) - len(sequence.blocks)

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
            needed = self._blocks_for(sequence) - len(matched)
            # One spare block for each running sequence, or admitting would soon preempt what it admits.
            if needed + self.pool.idle_among(matched) + len(self.running) > self.pool.available and self.running:
                return
            sequence.computed = len(matched) * self.pool.block_size
            length = self._length(sequence, budget, chunks)
            if not length:
                sequence.computed = 0
                return
            self._start(sequence, matched, needed)
            chunks.append(Chunk.next_of(sequence, length))
            budget -= length

    def _start(self, sequence: Sequence, matched: list[int], missed: int) -> None:
        self.pool.hold(matched)
        sequence.blocks = [*matched, *self.pool.allocate(missed)]
        sequence.stored = len(matched)
        self.pool.missed += missed
        if not sequence.num_output:
            sequence.cached_tokens = sequence.computed
        sequence.slot = self._slots.pop()
        sequence.starts += 1
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=_rank)

    def _match(self, sequence: Sequence) -> list[int]:
        """Reusable blocks of its prefix. At least one token is always computed, for its logits; all of them, if all are reported."""
        if sequence.wants_prompt_logprobs:
            return []
        usable = (len(sequence.tokens) - 1) // self.pool.block_size
        return self.pool.match(sequence.extend_keys(self.pool.block_size)[:usable])

    def _candidates(self) -> Iterator[Sequence]:
        """Waiting sequences in order, without those whose next block a running prompt is computing just now: they wait to share it."""
        size = self.pool.block_size
        prompts = [s for s in self.running if s.stored < s.num_prompt // size] if self.pool.reuse else []
        coming = {key for s in prompts for key in s.extend_keys(size)[s.stored :]}
        for sequence in list(self.waiting):
            keys = sequence.extend_keys(size)[: (len(sequence.tokens) - 1) // size]
            if not sequence.wants_prompt_logprobs and any(key in coming for key in keys):
                continue
            yield sequence
            if self.pool.reuse and sequence.blocks:
                coming.update(keys[sequence.stored :])


def _rank(sequence: Sequence) -> float:
    return sequence.rank
