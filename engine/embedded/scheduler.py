"""The choice of sequences for the next step, and of the number of tokens for each.

Running sequences come first: decodes (one token each), then the rest of started prompts, then waiting sequences, all
within one budget of tokens and in order of rank, but for what `Scheduler._turns` and `Scheduler._admit` say. A long
prompt does not take it all while shorter ones are there: the first started prompt leaves up to half to shorter ones,
which go on in order of what remains of them, and up to half of the step's largest chunk goes to waiting sequences, so
that the first never keeps less than a quarter. Where prompts cost much more than decodes, a long prompt also rests
after each chunk, until others have had as much. A sequence is admitted when there are blocks for all its present
tokens, or for its first chunk and the window in layers of a sliding window; it takes further ones as it goes on, and
when none is left the running sequence of the last rank is preempted: it gives its blocks back and waits to be
recomputed, mostly from the prefix cache.

A waiting sequence whose prompt a `Source` offers is FETCHING first: it has a slot and blocks while the source writes to
these, even while another replica still computes the prompt. One whose prompt was computed for another replica is HELD:
it keeps its blocks until that replica has read them. Neither is ever preempted.
"""

import bisect
from collections import abc
from collections.abc import Iterator
from typing import NamedTuple

from engine.embedded.kv.groups import MISSING, BlockGroups, Table
from engine.embedded.kv.source import Offload, Source
from engine.embedded.models.heads import ROUND_TOKENS
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.embedded.step import Chunk

PROMPT_LOGPROB_TOKENS = 256
"""Maximum number of tokens in a step for a sequence whose prompt log-probabilities are wanted: each needs a row of
logits."""


LAST_CHUNK = 1024
"""Maximum number of tokens in the last step of a prompt that another replica reads while it is computed: their blocks
are left to read at the end."""
DECODE_COST = 4
"""Prompt tokens that take as long as a step of a few decodes, where prompts rest."""


class Fetch(NamedTuple):
    """A sequence that has been given blocks for what a source offers it."""

    sequence: Sequence
    source: Source
    position: int
    """End of the offer: the first token that is computed here."""
    missing: list[list[int]]
    """Blocks to read, as indices in the sequence's table of each group of layers."""


class Scheduler:
    """Owns the lists of sequences, and the status of each; the groups own the blocks."""

    def __init__(
        self,
        blocks: BlockGroups,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_prompt_tokens: int,
        chunked_prefill: bool,
        small_step: int = 0,
        rest_after: int | None = None,
        sources: abc.Sequence[Source] = (),
        offload: Offload | None = None,
    ) -> None:
        """A step takes `max_num_tokens`, at most `max_prompt_tokens` of them of prompts if these are chunked, unless
        `prompt_tokens_alone` or `prompt_tokens_crowded` says otherwise. Beside decodes they only fill it up to
        `small_step` tokens, where that is enough: see `_prompt_budget`. Chunked prompts rest once `rest_after` of their
        tokens have been computed; with None they never rest. `sources` are asked in this order for prompts that are not
        in the pools; `offload` is told what has been computed."""
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        """Waiting sequences by rank."""
        self.running: list[Sequence] = []
        """Running sequences by rank."""
        self.fetching: list[Sequence] = []
        self.held: list[Sequence] = []
        self.held_blocks = 0
        """Blocks of held sequences in all groups; one that two sequences share counts twice."""
        self.orphans: list[list[Table]] = []
        """Blocks of no sequence that a source may still write to."""
        self.preemptions = 0
        self.prompt_tokens_alone = max_prompt_tokens
        """Maximum number of tokens of chunked prompts in a step in which nothing decodes; it may change at any time."""
        self.prompt_tokens_crowded = max_prompt_tokens
        """The same beside decodes, while more tokens wait than two such steps take."""
        self._sources = sources
        self._offload = offload
        self._admissions = 0
        self._fetches: list[Fetch] = []
        self._fetched: list[Sequence] = []
        """Running sequences of whose blocks some have been read and are not reusable yet."""
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_num_tokens = max_num_tokens
        self._max_prompt_tokens = max_prompt_tokens if chunked_prefill else max_num_tokens
        self._small_step = small_step if chunked_prefill else 0
        self._chunked = chunked_prefill
        self._rest_after = rest_after if chunked_prefill else None
        self._rest = 0
        """Prompt tokens that others may still compute while long prompts rest."""

    def add(self, sequence: Sequence) -> None:
        """Queue a waiting sequence by its rank."""
        assert sequence.status is SequenceStatus.WAITING and not sequence.tables and sequence.slot < 0
        bisect.insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished or aborted sequence and free its blocks. One that is FETCHING has to be abandoned
        instead."""
        assert sequence.status is not SequenceStatus.FETCHING, "a source may still write to its blocks"
        self._take_out(sequence, SequenceStatus.FINISHED)
        self.blocks.release(sequence.tables)
        sequence.tables = []

    def hold(self, sequence: Sequence) -> None:
        """Keep the blocks of a running sequence, and nothing else of it, until it is removed."""
        assert sequence.status is SequenceStatus.RUNNING
        self._take_out(sequence, SequenceStatus.HELD)
        self.held.append(sequence)
        self.held_blocks += self.blocks.count(sequence.tables)

    @property
    def settled(self) -> bool:
        """Whether no other sequence can join those that run before one of them ends."""
        return not (self.fetching or (self.waiting and self._slots))

    def take_fetches(self) -> list[Fetch]:
        """Return the reads for sequences that have become FETCHING since the last call.

        The step before must have ended by then: it may still write to blocks that have been given back.
        """
        fetches, self._fetches = self._fetches, []
        return fetches

    def fetched(self, fetch: Fetch) -> None:
        """Run a sequence whose blocks have been read, or are before the device computes them; `confirm` or `refute`
        follows."""
        sequence = fetch.sequence
        assert sequence.status is SequenceStatus.FETCHING
        self.fetching.remove(sequence)
        self._release_sources(sequence)
        self._run(sequence, fetch.position)
        sequence.here = max(fetch.position // self.blocks.block_size, sequence.stored)

    def confirm(self, sequence: Sequence) -> None:
        """Note that the blocks that were read for a running sequence are what was offered. They become reusable with
        `store_fetched`, or as soon as another sequence could share them."""
        assert sequence.status is SequenceStatus.RUNNING
        self._fetched.append(sequence)

    def refute(self, sequence: Sequence) -> None:
        """Queue a running sequence again, since the blocks that were read for it are not what was offered."""
        assert sequence.status is SequenceStatus.RUNNING and sequence not in self._fetched
        self._queue_again(sequence)

    def store_fetched(self, most: int | None = None) -> None:
        """Make blocks reusable that have been read, `most` of them if given. All blocks of a long prompt take
        milliseconds, for each of its tokens is in an event."""
        size = self.blocks.block_size
        while self._fetched and most != 0:
            sequence = self._fetched[0]
            first, full = sequence.stored, sequence.here
            if most is not None:
                full = min(full, first + most)
                most -= full - first
            keys = sequence.extend_keys(size)[:full]
            salt = sequence.request.cache_salt
            self.blocks.store(sequence.tables, keys, sequence.tokens, first, sequence.mm_keys, salt)
            sequence.stored = full
            if full == sequence.here:
                del self._fetched[0]
                self._note_admission(sequence)

    def abandon(self, sequence: Sequence, *, again: bool) -> list[Table]:
        """Take out a FETCHING sequence and leave its blocks to `orphans`, until `release_orphan`; with `again` it is
        queued again."""
        assert sequence.status is SequenceStatus.FETCHING
        self._fetches = [fetch for fetch in self._fetches if fetch.sequence is not sequence]
        self._take_out(sequence, SequenceStatus.WAITING if again else SequenceStatus.FINISHED)
        tables, sequence.tables, sequence.stored = sequence.tables, [], 0
        self.orphans.append(tables)
        if again:
            self.add(sequence)
        return tables

    def release_orphan(self, tables: list[Table]) -> None:
        """Free what `abandon` returned."""
        self.orphans.remove(tables)
        self.blocks.release(tables)

    def schedule(self, most: int | None = None) -> list[Chunk]:
        """Return the chunks of the next step, those of one token first, with `most` tokens if given: no fewer than
        sequences may run. They count as computed from now on.

        There are none when everything that runs waits for its last pending token.
        """
        total = min(self._max_num_tokens, most or self._max_num_tokens)
        preempted = self.preemptions
        prompts: list[Sequence] = []
        chunks: list[Chunk] = []
        size = self.blocks.block_size
        for sequence in list(self.running):  # decodes first
            start = sequence.computed
            if len(sequence.tokens) + sequence.pending - start > 1:
                prompts.append(sequence)
            elif (
                sequence.status is SequenceStatus.RUNNING
                and not sequence.spent
                and not sequence.lacks_grammar
                and len(chunks) < total
                and (start < len(sequence.tables[-1]) * size or self._grow(sequence, 1))
            ):
                chunks.append(Chunk(sequence, start, 1, 1, sequence.admission))
        decodes = len(chunks)
        drafted = self._add_drafts(chunks, total - decodes, bool(prompts or (self.waiting and self._slots)))
        long = [sequence for sequence in prompts if self._is_long(sequence)]
        if self._rest > 0 and (decodes or len(long) < len(prompts)):
            prompts = [sequence for sequence in prompts if sequence not in long]
        budget = self._prompt_budget(prompts, decodes + drafted, total)
        for sequence, left in self._turns(prompts, budget):
            if (
                sequence.status is SequenceStatus.RUNNING
                and (length := self._length(sequence, budget - left, chunks))
                and self._grow(sequence, length)
            ):
                chunks.append(Chunk.next_of(sequence, length))
                budget -= length
        if preempted != self.preemptions:
            chunks = [chunk for chunk in chunks if chunk.current]
        elif self.waiting:
            self._admit(budget, chunks, decodes)
        for chunk in chunks:
            chunk.sequence.computed = chunk.start + chunk.length
        if prompts or len(chunks) > decodes or drafted:
            chunks.sort(key=_has_several)
        if long:
            self._note_rest(chunks, long)
        return chunks

    def fit_rounds(self, chunks: list[Chunk], sequences: list[Sequence], rounds: int) -> tuple[int, list[Chunk]]:
        """Return how many of some rounds of drafts (`models/heads.py`) fit into the chunks of a step, whose drafts are
        room for them, and chunks of these rounds. None fit if the step is not of these sequences alone, or one has no
        room: then the chunks have no drafts."""
        if [chunk.sequence for chunk in chunks] != sequences:
            rounds = 0
        rounds = min(rounds, *((1 + len(chunk.draft)) // ROUND_TOKENS for chunk in chunks))
        length = max(rounds * ROUND_TOKENS, 1)
        fitting = [
            chunk._replace(length=length, sampled=length, draft=chunk.draft[: length - 1]) if chunk.draft else chunk
            for chunk in chunks
        ]
        for chunk in fitting:
            chunk.sequence.computed = chunk.start + chunk.length
        return rounds, fitting

    def _prompt_budget(self, prompts: list[Sequence], decoding: int, total: int) -> int:
        """Return how many tokens of prompts a step of at most `total` tokens takes beside this many of decodes.

        While no more tokens wait than two large steps take (`prompt_tokens_crowded`), small steps compute them: these
        cost hardly more than the decodes alone, which read all weights in any case, and every sequence goes on. That
        needs twice as many tokens of prompts as of decodes, or more would come than are computed.
        """
        if not decoding:
            return min(total, self.prompt_tokens_alone if self._chunked else self._max_prompt_tokens)
        most, room = self._max_prompt_tokens, self._small_step - decoding
        crowded = max(most, self.prompt_tokens_crowded)
        usual = most if room < 2 * decoding else min(most, room)
        crowds = usual < crowded and self._more_wait(prompts, 2 * crowded)
        return min(total - decoding, crowded if crowds else usual)

    def _more_wait(self, prompts: list[Sequence], tokens: int) -> bool:
        """Return whether running and waiting sequences have more than this many tokens of prompts."""
        waiting = sum(sequence.remaining for sequence in prompts)
        for sequence in self.waiting[: len(self._slots)]:
            if waiting > tokens:
                break
            waiting += len(sequence.tokens)
        return waiting > tokens

    def _next_large_step(self, budget: int) -> int:
        """Return how many tokens of prompts the next step takes, if this one, with this budget, is large and so many
        prompts wait that the next one is, too; else 0."""
        crowded = min(budget, self.prompt_tokens_crowded)
        large = 0 < self._small_step < crowded and self._more_wait([], budget + 2 * self.prompt_tokens_crowded)
        return crowded if large else 0

    def computed(self, chunks: list[Chunk]) -> None:
        """Note that a step has written the keys and values of its chunks: full blocks become reusable, and those
        behind a window are freed."""
        size, sliding = self.blocks.block_size, self.blocks.sliding
        if sliding:
            self.store_fetched()  # before those behind the window are freed
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            full = end // size
            if (full <= sequence.stored and not sliding) or not chunk.current:
                continue
            if sequence in self._fetched:
                sequence.here = max(sequence.here, full)  # they follow, in order
            elif full > sequence.stored:
                keys = sequence.extend_keys(size)[:full]
                salt = sequence.request.cache_salt
                self.blocks.store(sequence.tables, keys, sequence.tokens, sequence.stored, sequence.mm_keys, salt)
                before, sequence.stored = sequence.stored, full
                if self._offload is not None:
                    self._offload.offload(sequence, before, full)
            self.blocks.leave_behind(sequence.tables, end)

    def verified(self, chunk: Chunk, taken: int) -> Chunk:
        """Note that `taken` of the tokens drawn after a chunk with a draft were accepted; return the chunk without
        rejected ones.

        The last of them has yet to be computed, and what has been computed behind those before it is void: the next
        step writes over it.
        """
        if chunk.current:
            chunk.sequence.computed = chunk.start + taken
        return chunk._replace(length=taken, draft=())

    def audit(self) -> None:
        """Assert that every block is accounted for."""
        sequences = (*self.running, *self.waiting, *self.fetching, *self.held)
        self.blocks.audit([*(sequence.tables for sequence in sequences), *self.orphans])

    def _take_out(self, sequence: Sequence, then: SequenceStatus) -> None:
        """Take a sequence out of its list, and out of its slot if it has one, and give it another status."""
        match sequence.status:
            case SequenceStatus.WAITING:
                assert not sequence.tables and sequence.slot < 0
                self.waiting.remove(sequence)
            case SequenceStatus.FETCHING:
                self.fetching.remove(sequence)
            case SequenceStatus.RUNNING:
                if sequence in self._fetched:
                    self.store_fetched()
                self.running.remove(sequence)
            case SequenceStatus.HELD:
                self.held.remove(sequence)
                self.held_blocks -= self.blocks.count(sequence.tables)
            case SequenceStatus.FINISHED:
                raise AssertionError("the sequence has been taken out before")
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
            sequence.slot = -1
        sequence.status = then
        self._release_sources(sequence)

    def _release_sources(self, sequence: Sequence) -> None:
        for source in self._sources:
            source.release(sequence)

    def _is_long(self, sequence: Sequence) -> bool:
        return self._rest_after is not None and sequence.computed - sequence.cached_tokens >= self._rest_after

    def _note_rest(self, chunks: list[Chunk], long: list[Sequence]) -> None:
        """Have long prompts rest for as many tokens as they took in this step, or count what the others had."""
        if taken := sum(chunk.length for chunk in chunks if chunk.sequence in long):
            self._rest = taken
        else:
            self._rest -= DECODE_COST + sum(chunk.length for chunk in chunks if chunk.length > 1 and not chunk.draft)

    def _turns(self, prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """Return started prompts in the order in which they take tokens, each with the number that it has to leave."""
        if not self._chunked or len(prompts) < 2:
            return [(sequence, 0) for sequence in prompts]
        first, *others = prompts
        others.sort(key=_remaining)
        shorter = sum(self._length(other, budget, []) for other in others if other.remaining < first.remaining)
        return [(first, min(budget // 2, shorter)), *((other, 0) for other in others)]

    def _length(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Return the largest chunk of the sequence that the budget allows; 0 if none fits. Unchunked, a long prompt
        may run alone."""
        remaining = min(sequence.remaining - sequence.lacks_grammar, self.blocks.max_chunk)
        if self._chunked:
            if sequence.wants_prompt_logprobs:
                return min(remaining, budget, PROMPT_LOGPROB_TOKENS)
            if sequence.request.early_handoff and LAST_CHUNK < remaining <= budget and not self.blocks.sliding:
                return max(remaining - LAST_CHUNK, remaining // 2)
            return min(remaining, budget)
        return remaining if remaining <= budget or not chunks else 0

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Give the sequence blocks for its next `count` tokens, preempting others of a later rank, or itself, when
        there are none."""
        end = sequence.computed + count
        if end <= len(sequence.tables[-1]) * self.blocks.block_size:  # no other table is shorter
            return True
        while not self.blocks.grow(sequence.tables, sequence.length, end):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _add_drafts(self, decodes: list[Chunk], room: int, prompts_wait: bool) -> int:
        """Add their drafts to the decodes of a step, as far as there are blocks to spare, and return how many tokens
        that are: at most `room`, of which half is for prompts if any wait. Nothing follows a token that the host does
        not know yet."""
        spare = room = room // 2 if prompts_wait else room
        for index, chunk in enumerate(decodes):
            sequence = chunk.sequence
            if not sequence.draft or sequence.pending or not chunk.current:
                continue
            draft = sequence.draft[: max(0, min(spare, self.blocks.max_chunk - 1))]
            end = chunk.start + 1 + len(draft)
            if draft and self.blocks.grow(sequence.tables, end, end):
                decodes[index] = chunk._replace(length=1 + len(draft), sampled=1 + len(draft), draft=draft)
                spare -= len(draft)
        return room - spare

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.status is SequenceStatus.RUNNING
        self.store_fetched()
        if self._offload is not None:
            self._offload.offload(sequence, 0, sequence.stored, always=True)
        self._queue_again(sequence)
        self.preemptions += 1

    def _queue_again(self, sequence: Sequence) -> None:
        self._take_out(sequence, SequenceStatus.WAITING)
        self.blocks.release(sequence.tables)
        sequence.tables = []
        sequence.computed = sequence.stored = 0
        self.add(sequence)

    def _admit(self, budget: int, chunks: list[Chunk], decodes: int) -> None:
        """Start waiting sequences with the rest of the budget, and with half of the largest chunk of a prompt.

        Of that half, a sequence that is not shorter than what remains of the large prompt gets one block, and only to
        make way for a shorter one behind it in the queue.

        Where at most half of a large step is left and the next one is large in any case, a prompt that would only end
        there waits for it: attention is faster over a prompt's own keys than over blocks.
        """
        self.store_fetched()  # they may share it
        giver = max(range(decodes, len(chunks)), key=lambda index: chunks[index].length, default=-1)
        spare = chunks[giver].length // 2 if self._chunked and giver >= 0 else 0
        large = chunks[giver].sequence.remaining if spare else 0
        whole = 0 if spare else self._next_large_step(budget)
        passage = self.blocks.block_size if any(len(sequence.tokens) < large for sequence in self.waiting) else 0
        for sequence in self._candidates():
            if not self._slots:
                return
            if sequence.pending and not sequence.lacks_first:
                continue  # it was refuted while a further step computed it
            if offered := self._offered(sequence):
                if not self._fetch(sequence, *offered) and not sequence.lacks_first:
                    return
                continue
            if sequence.lacks_first:
                continue
            if budget + spare <= 0:
                return
            matched = self._match(sequence)
            sequence.computed = len(matched[0]) * self.blocks.block_size
            if sequence.lacks_grammar and (sequence.remaining == 1 or not self._may_run_ahead()):
                sequence.computed = 0
                continue
            given = spare if sequence.remaining < large else min(spare, passage)
            length = self._length(sequence, max(budget, given), chunks)
            rest = sequence.remaining - sequence.lacks_grammar
            if length < rest == self._length(sequence, whole, chunks) and 2 * budget <= whole:
                sequence.computed = 0
                return
            if not length or not self._fits(matched, sequence.length, sequence.computed + length):
                sequence.computed = 0
                return
            self._start(sequence, matched, length)
            chunks.append(Chunk.next_of(sequence, length))
            budget -= length
            if budget < 0:
                chunks[giver] = Chunk.next_of(chunks[giver].sequence, chunks[giver].length + budget)
                spare += budget
                budget = 0

    def _may_run_ahead(self) -> bool:
        """Return whether another prompt may be computed before its grammar is there: those take half of the slots."""
        return 2 * sum(sequence.lacks_grammar for sequence in self.running) < len(self.running) + len(self._slots) - 1

    def _fits(self, tables: list[Table], length: int, end: int) -> bool:
        # One spare block for each running sequence, or admitting would soon preempt what it admits.
        spare = len(self.running) + len(self.fetching)
        if self.blocks.sliding:  # started prompts have yet to take the blocks of a window
            spare += sum(self.blocks.owed(s.tables, s.length, s.computed) for s in self.running if s.remaining > 1)
        alone = not (spare or self.held or self.orphans)
        return alone or self.blocks.fits(tables, length, end, spare)

    def _start(self, sequence: Sequence, matched: list[Table], length: int) -> None:
        sequence.stored = len(matched[0])
        self._release_sources(sequence)
        self._seat(sequence, matched, sequence.computed + length)
        self._run(sequence, sequence.computed)
        self._note_admission(sequence)

    def _note_admission(self, sequence: Sequence) -> None:
        if self._offload is not None:
            self._offload.admitted(sequence)

    def _run(self, sequence: Sequence, computed: int) -> None:
        """Have a sequence run that has a slot and blocks, of which `computed` tokens are filled."""
        sequence.status = SequenceStatus.RUNNING
        sequence.computed = computed
        if not sequence.num_output:
            sequence.cached_tokens = computed
        bisect.insort(self.running, sequence, key=_rank)

    def _seat(self, sequence: Sequence, tables: list[Table], end: int) -> list[list[int]]:
        """Give a waiting sequence a slot, tables that fit, and blocks up to `end`; return the indices of those that
        were MISSING, by group."""
        assert sequence.status is SequenceStatus.WAITING
        self.blocks.reference(tables, sequence.length)
        missing = self.blocks.fill(tables)
        grown = self.blocks.grow(tables, sequence.length, end)
        assert grown, "alone, every sequence fits"
        self.waiting.remove(sequence)
        self._admissions += 1
        sequence.tables = tables
        sequence.slot = self._slots.pop()
        sequence.admission = self._admissions
        return missing

    def _offered(self, sequence: Sequence) -> tuple[Source, int, list[Table]] | None:
        """Return the first source that offers blocks which are not here, the end of its offer, and tables up to
        there."""
        if not self._sources or sequence.wants_prompt_logprobs:
            return None
        if sequence.lacks_grammar and not self._may_run_ahead():
            return None
        size = self.blocks.block_size
        for source in self._sources:
            position = source.offer(sequence)
            assert position < sequence.length, "one token has to be computed"
            if position:
                tables = self.blocks.plan(sequence.extend_keys(size)[: position // size], position)
                if any(MISSING in table for table in tables):
                    return source, position, tables
        return None

    def _fetch(self, sequence: Sequence, source: Source, position: int, tables: list[Table]) -> bool:
        """Have the MISSING blocks of a sequence read, if there is room for all of the offer."""
        if not self._fits(tables, sequence.length, position):
            return False
        known = min(table.index(MISSING) for table in tables if MISSING in table)
        self._fetches.append(Fetch(sequence, source, position, self._seat(sequence, tables, position)))
        sequence.status = SequenceStatus.FETCHING
        sequence.stored = known
        bisect.insort(self.fetching, sequence, key=_rank)
        return True

    def _match(self, sequence: Sequence) -> list[Table]:
        """Return reusable blocks of its prefix. One token at least is computed, for its logits; all of them, if all
        are reported."""
        size = self.blocks.block_size
        usable = 0 if sequence.wants_prompt_logprobs else (len(sequence.tokens) - 1) // size
        return self.blocks.match(sequence.extend_keys(size)[:usable])

    def _candidates(self) -> Iterator[Sequence]:
        """Yield waiting sequences in order, but not those whose next block a running prompt is computing, or a
        fetching one is reading: they wait to share it. None waits for what another replica has yet to compute."""
        size = self.blocks.block_size
        prompts = (
            [
                s
                for s in (*self.running, *self.fetching)
                if s.stored < (s.num_prompt - s.lacks_grammar) // size and not s.lacks_first
            ]
            if self.blocks.reuse
            else []
        )
        coming = {
            key for s in prompts for key in s.extend_keys(size)[s.stored : (len(s.tokens) - s.lacks_grammar) // size]
        }
        for sequence in list(self.waiting):
            keys = sequence.extend_keys(size)[: (len(sequence.tokens) - 1) // size]
            if not sequence.wants_prompt_logprobs and any(key in coming for key in keys):
                continue
            yield sequence
            if self.blocks.reuse and sequence.tables and not sequence.lacks_first:
                coming.update(keys[sequence.stored :])


def _rank(sequence: Sequence) -> float:
    return sequence.rank


def _has_several(chunk: Chunk) -> bool:
    return chunk.length > 1


def _remaining(sequence: Sequence) -> int:
    return sequence.remaining
