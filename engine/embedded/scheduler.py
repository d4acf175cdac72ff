"""Which sequences run in the next step, and with how many tokens each.

Running sequences come first: decodes (one token each), then the rest of started prompts, then waiting sequences, all within one budget
of tokens and in order of rank. A sequence is admitted when blocks for all its present tokens are there, or for its first chunk and the
window in layers of a sliding window; it takes further ones as it goes on, and when none is left the running sequence of the last rank is
preempted: it gives its blocks back and waits to be recomputed, mostly from the prefix cache.

Of disaggregation it knows that a sequence can be fetching, which is to have a slot and blocks while another replica's are read into them,
and held, which is to keep the blocks of a computed prompt for another replica. Neither is ever preempted.
"""

import bisect
from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from typing import NamedTuple

from engine.embedded.kv.groups import MISSING, BlockGroups, Table
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


class Fetch(NamedTuple):
    """A sequence that has been given blocks for its prompt; `missing` has, for each group, the indices in its table of those to read."""

    sequence: Sequence
    missing: list[list[int]]


class Scheduler:
    """Owns the lists of sequences; the groups own the blocks."""

    def __init__(self, blocks: BlockGroups, *, max_num_seqs: int, max_num_tokens: int, chunked_prefill: bool) -> None:
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        """In order of rank."""
        self.running: list[Sequence] = []
        """In order of rank."""
        self.fetching: list[Sequence] = []
        self.held: list[Sequence] = []
        self.held_blocks = 0
        """Of all groups; one that two sequences share counts twice."""
        self.orphans: list[list[Table]] = []
        """Blocks that nobody has any more and that a transfer may still write to."""
        self.preemptions = 0
        self._fetches: list[Fetch] = []
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_tokens = max_num_tokens
        self._chunked = chunked_prefill

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its rank."""
        bisect.insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished or aborted sequence and free its blocks."""
        self._take_out(sequence)
        self.blocks.release(sequence.tables)
        sequence.tables = []

    def hold(self, sequence: Sequence) -> None:
        """Keep the blocks of a running sequence, and nothing else of it, until it is removed."""
        self._take_out(sequence)
        self.held.append(sequence)
        self.held_blocks += self.blocks.count(sequence.tables)

    def take_fetches(self) -> list[Fetch]:
        """What is to be read for sequences that have begun to fetch since the last time. The step before must have ended by then: it may
        still write to blocks that have been given back."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def fetched(self, sequence: Sequence) -> None:
        """A fetching sequence's blocks have been read: they become reusable, and it runs."""
        self.fetching.remove(sequence)
        sequence.remote = None
        bisect.insort(self.running, sequence, key=_rank)
        sequence.computed = sequence.num_prompt
        keys = sequence.extend_keys(self.blocks.block_size)[: sequence.num_prompt // self.blocks.block_size]
        self.blocks.store(sequence.tables, keys, sequence.tokens, 0, sequence.mm_keys, sequence.request.cache_salt)
        sequence.stored = len(keys)

    def abandon(self, sequence: Sequence) -> list[Table]:
        """Take out a fetching sequence and leave its blocks to `orphans`, until `release_orphan`."""
        self._take_out(sequence)
        tables, sequence.tables, sequence.remote, sequence.stored = sequence.tables, [], None, 0
        self.orphans.append(tables)
        return tables

    def release_orphan(self, tables: list[Table]) -> None:
        """Free what `abandon` returned."""
        self.orphans.remove(tables)
        self.blocks.release(tables)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, taken as computed from now on; empty when all that runs waits for its last pending token."""
        preempted = self.preemptions
        prompts: list[Sequence] = []
        chunks: list[Chunk] = []
        for sequence in list(self.running):  # decodes first
            if sequence.remaining > 1:
                prompts.append(sequence)
            elif (
                not sequence.spent
                and sequence.slot >= 0
                and len(chunks) < self._max_num_tokens
                and self._grow(sequence, 1)
            ):
                chunks.append(Chunk.next_of(sequence, 1))
        budget = self._max_num_tokens - len(chunks)
        for sequence in prompts:
            if (
                sequence.slot >= 0
                and (length := self._length(sequence, budget, chunks))
                and self._grow(sequence, length)
            ):
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
            self.blocks.store(
                sequence.tables, keys, sequence.tokens, sequence.stored, sequence.mm_keys, sequence.request.cache_salt
            )
            sequence.stored = full
        self.blocks.leave_behind(sequence.tables, end)

    def audit(self) -> None:
        """Assert that every block is accounted for."""
        sequences = (*self.running, *self.waiting, *self.fetching, *self.held)
        self.blocks.audit([*(sequence.tables for sequence in sequences), *self.orphans])

    def _take_out(self, sequence: Sequence) -> None:
        """Out of its list, and out of its slot if it has one."""
        if sequence.slot < 0:
            if sequence.tables:
                self.held.remove(sequence)
                self.held_blocks -= self.blocks.count(sequence.tables)
            else:
                self.waiting.remove(sequence)
            return
        (self.running if sequence.remote is None else self.fetching).remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

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
            if not self._slots:
                return
            if sequence.remote is not None and (missing := self._missing(sequence)):
                if not self._fetch(sequence, missing):
                    return
                continue
            if budget <= 0:
                return
            matched = self._match(sequence)
            sequence.computed = len(matched[0]) * self.blocks.block_size
            length = self._length(sequence, budget, chunks)
            if not length or not self._fits(matched, sequence.length, sequence.computed + length):
                sequence.computed = 0
                return
            self._start(sequence, matched, length)
            chunks.append(Chunk.next_of(sequence, length))
            budget -= length

    def _fits(self, tables: list[Table], length: int, end: int) -> bool:
        # One spare block for each running sequence, or admitting would soon preempt what it admits.
        spare = len(self.running) + len(self.fetching)
        alone = not (spare or self.held or self.orphans)
        return alone or self.blocks.fits(tables, length, end, spare)

    def _start(self, sequence: Sequence, matched: list[Table], length: int) -> None:
        sequence.stored, sequence.remote = len(matched[0]), None
        self._seat(sequence, matched, sequence.computed + length)
        if not sequence.num_output:
            sequence.cached_tokens = sequence.computed
        bisect.insort(self.running, sequence, key=_rank)

    def _seat(self, sequence: Sequence, tables: list[Table], end: int) -> list[list[int]]:
        """Give a waiting sequence a slot, tables that fit, and blocks up to `end`; the indices of those that were MISSING, by group."""
        self.blocks.hold(tables, sequence.length)
        missing = self.blocks.fill(tables)
        grown = self.blocks.grow(tables, sequence.length, end)
        assert grown, "alone, every sequence fits"
        self.waiting.remove(sequence)
        sequence.tables, sequence.slot = tables, self._slots.pop()
        sequence.starts += 1
        return missing

    def _missing(self, sequence: Sequence) -> list[Table]:
        """Tables for a prompt that another replica has computed; empty if all of it is here."""
        size = self.blocks.block_size
        tables = self.blocks.plan(sequence.extend_keys(size)[: sequence.num_prompt // size], sequence.num_prompt)
        return tables if any(MISSING in table for table in tables) else []

    def _fetch(self, sequence: Sequence, tables: list[Table]) -> bool:
        """Have its missing blocks read, if there is room for all of its prompt."""
        if not self._fits(tables, sequence.length, sequence.num_prompt):
            return False
        known = min((table.index(MISSING) for table in tables if MISSING in table), default=0)
        self._fetches.append(Fetch(sequence, self._seat(sequence, tables, sequence.num_prompt)))
        sequence.stored = known
        bisect.insort(self.fetching, sequence, key=_rank)
        return True

    def _match(self, sequence: Sequence) -> list[Table]:
        """Reusable blocks of its prefix. At least one token is always computed, for its logits; all of them, if all are reported."""
        size = self.blocks.block_size
        usable = 0 if sequence.wants_prompt_logprobs else (len(sequence.tokens) - 1) // size
        return self.blocks.match(sequence.extend_keys(size)[:usable])

    def _candidates(self) -> Iterator[Sequence]:
        """Waiting sequences in order, without those whose next block a running prompt is computing, or a fetching one is reading, just now:
        they wait to share it."""
        size = self.blocks.block_size
        prompts = (
            [s for s in (*self.running, *self.fetching) if s.stored < s.num_prompt // size] if self.blocks.reuse else []
        )
        coming = {key for s in prompts for key in s.extend_keys(size)[s.stored :]}
        for sequence in list(self.waiting):
            keys = sequence.extend_keys(size)[: (len(sequence.tokens) - 1) // size]
            if not sequence.wants_prompt_logprobs and any(key in coming for key in keys):
                continue
            yield sequence
            if self.blocks.reuse and sequence.tables:
                coming.update(keys[sequence.stored :])


def note_pending(chunks: Sequence_[Chunk], change: int) -> None:
    """That the last tokens of chunks that sample are under way (1), or have arrived (-1)."""
    for chunk in chunks:
        if chunk.samples:
            chunk.sequence.pending += change
            chunk.sequence.sampler.pending = chunk.sequence.pending


def _rank(sequence: Sequence) -> float:
    return sequence.rank
