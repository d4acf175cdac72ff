"""The scheduler by property, with prompts that a source offers.

Prompts are read from other replicas or from a tier, and sequences are held for a replica.
"""

import itertools
import random
from dataclasses import dataclass, field

from hypothesis import example, given, settings

from engine.embedded.kv.blocks import BlockKey
from engine.embedded.kv.groups import Table
from engine.embedded.kv.source import Reading
from engine.embedded.scheduler import Fetch, Scheduler
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.types import GenerateRequest, SamplingParams
from tests.engine.embedded.test_scheduler import SIZE, UNDER_PRESSURE, Machine, Step, Windows, expected, machine, make


def make_prefill(name: str, prompt: list[int], arrival: float) -> Sequence:
    request = GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=9), prefill_only=True
    )
    return Sequence(request=request, sampler=None, rank=arrival, arrival=arrival, tokens=list(prompt))  # type: ignore[arg-type]


def make_decode(name: str, prompt: list[int], max_tokens: int, arrival: float) -> Sequence:
    sequence = make(name, prompt, max_tokens, arrival=arrival)
    sequence.tokens = expected(prompt, 1)
    return sequence


class _Source:
    """The part of a `Source` that the scheduler uses."""

    def read(self, sequence: Sequence, missing: list[list[int]]) -> Reading:
        raise NotImplementedError("the machine reads itself")


class Remote(_Source):
    """Offers the whole prompt of a sequence that another replica has prefilled, once."""

    def __init__(self) -> None:
        self.prompts: set[str] = set()

    def offer(self, sequence: Sequence) -> int:
        return sequence.num_prompt if sequence.request.request_id in self.prompts else 0

    def release(self, sequence: Sequence) -> None:
        self.prompts.discard(sequence.request.request_id)


class Tier(_Source):
    """A source that offers blocks by their keys, as a tier in host memory would.

    It offers the first blocks of some prompts, each until it fails.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.keys: set[BlockKey] = set()
        self.offered: set[str] = set()

    def keep(self, sequence: Sequence) -> None:
        """Take some of its first blocks, as if they had been evicted to here."""
        keys = sequence.extend_keys(SIZE)
        self.keys.update(keys[: self._rng.randrange(len(keys) + 1)])

    def offer(self, sequence: Sequence) -> int:
        keys = sequence.extend_keys(SIZE)[: (len(sequence.tokens) - 1) // SIZE]
        found = len(list(itertools.takewhile(self.keys.__contains__, keys)))
        return found * SIZE

    def release(self, sequence: Sequence) -> None:
        pass


@dataclass
class Replica(Machine):
    """Fetches end when `rng` says so, well or badly; so do the lives of what is held, which nobody may write to."""

    rng: random.Random = field(default_factory=random.Random)
    readings: list[Fetch] = field(default_factory=list)
    orphans: list[tuple[Fetch, list[Table]]] = field(default_factory=list)
    prefilled: set[str] = field(default_factory=set)
    read_from_tier: int = 0

    def turn(self) -> None:
        """A step, if there is something to do, and whatever else happens."""
        previous, self.launched = self.launched, self.launch()
        self.scheduler.store_fetched(self.rng.choice([1, 2, None]))
        self.finish(previous)
        if not self.overlap:
            self.finish(self.launched)
            self.launched = []
        self.readings += self.scheduler.take_fetches()
        for fetch in list(self.readings):
            if (chance := self.rng.random()) < 0.6:
                self.readings.remove(fetch)
                self.end(fetch, chance)
        for fetch, tables in list(self.orphans):
            self.write(fetch, tables, -1)
            if self.rng.random() < 0.5:
                self.orphans.remove((fetch, tables))
                self.scheduler.release_orphan(tables)
        for sequence in list(self.scheduler.held):
            self.check_held(sequence)
            if self.rng.random() < 0.3:
                self.scheduler.remove(sequence)
        self.scheduler.audit()
        self.steps += 1

    def end(self, fetch: Fetch, chance: float) -> None:
        sequence = fetch.sequence
        if chance < 0.4:
            self.write(fetch, sequence.tables, 0)
            self.scheduler.fetched(fetch)
            self.scheduler.confirm(fetch.sequence)
            self.read_from_tier += isinstance(fetch.source, Tier)
            return
        if isinstance(fetch.source, Tier):
            fetch.source.keys.clear()  # what failed is not offered again
        self.orphans.append((fetch, self.scheduler.abandon(sequence, again=True)))

    def write(self, fetch: Fetch, tables: list[Table], wrong: int) -> None:
        sequence = fetch.sequence
        for group, indices in enumerate(fetch.missing):
            for index in indices:
                for position in range(index * SIZE, min(fetch.position, (index + 1) * SIZE)):
                    self.memory[group, tables[group][index], position % SIZE] = wrong or sequence.tokens[position]

    def check_held(self, sequence: Sequence) -> None:
        """All that a decode needs is there."""
        for group, (pool, table) in enumerate(zip(self.scheduler.blocks.pools, sequence.tables, strict=True)):
            assert len(table) == -(-sequence.num_prompt // SIZE)
            seen = range(pool.first(sequence.num_prompt) * SIZE, sequence.num_prompt)
            assert [self.memory[group, table[i // SIZE], i % SIZE] for i in seen] == sequence.tokens[
                seen.start : seen.stop
            ]

    def finish(self, step: Step) -> None:
        prefills = [(chunk, tables) for chunk, tables in step if chunk.sequence.request.prefill_only]
        super().finish([entry for entry in step if entry not in prefills])
        for chunk, tables in prefills:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            for group, table in enumerate(tables):
                for position in range(chunk.start, end):
                    self.memory[group, table[position // SIZE], position % SIZE] = sequence.tokens[position]
            self.check_context(chunk, tables)
            sequence.pending -= chunk.sampled
            if sequence not in (*self.scheduler.running, *self.scheduler.waiting):
                continue
            self.scheduler.computed([chunk])
            if chunk.sampled and chunk.current:
                sequence.tokens.append(sum(sequence.tokens) % 97)
                self.scheduler.hold(sequence)
                self.prefilled.add(sequence.request.request_id)


@example(
    seed=3033, blocks=10, seqs=2, budget=20, flags=(False, False, True), windows=(4, 12)
)  # preempted while its token is pending
@example(
    seed=2, blocks=10, seqs=1, budget=1, flags=(True, False, True), windows=(None,)
)  # blocks that a step under way still writes to
@settings(max_examples=600, deadline=None)
@given(**UNDER_PRESSURE)
def test_every_sequence_gets_its_output_whoever_computes_its_prompt(
    seed: int, blocks: int, seqs: int, budget: int, flags: tuple[bool, bool, bool], windows: Windows
) -> None:
    rng = random.Random(seed)
    chunked, reuse, overlap = flags
    tiered = seed % 2
    remote, tier = Remote(), Tier(rng)
    scheduler = machine(
        blocks=blocks,
        seqs=seqs,
        budget=max(budget, seqs),
        chunked=chunked,
        reuse=reuse,
        windows=windows,
        sources=(remote, tier),
    ).scheduler
    replica = Replica(scheduler, max(budget, seqs), seqs, chunked, overlap, rng)
    shared = [rng.randrange(9) for _ in range(16)]
    sequences: list[Sequence] = []
    for index in range(rng.randrange(1, 16)):
        prompt = shared[: rng.randrange(0, 17)] + [rng.randrange(9) for _ in range(rng.randrange(1, 12))]
        kinds = [
            make(str(index), prompt, rng.randrange(1, 12), arrival=float(index)),
            make_prefill(str(index), prompt, float(index)),
            make_decode(str(index), prompt, rng.randrange(2, 12), float(index)),
        ]
        sequences.append(rng.choice(kinds))
        if sequences[-1] is kinds[2]:
            remote.prompts.add(str(index))
        elif sequences[-1] is kinds[0] and tiered:
            tier.keep(kinds[0])
    pending, aborted = list(sequences), set()
    while (
        pending or scheduler.running or scheduler.waiting or scheduler.fetching or scheduler.held or scheduler.orphans
    ):
        for _ in range(min(len(pending), rng.randrange(0, 3))):
            scheduler.add(pending.pop(0))
        alive = [*scheduler.running, *scheduler.waiting]
        if alive and rng.random() < 0.1:
            aborted.add(rng.choice(alive).request.request_id)
            scheduler.remove(next(s for s in alive if s.request.request_id in aborted))
        replica.turn()
        assert replica.steps < 20_000, "starvation"
    for sequence in sequences:
        name, prompt = sequence.request.request_id, list(sequence.request.prompt_token_ids)
        if sequence.request.prefill_only:
            assert (name in replica.prefilled) != (name in aborted)
        elif name not in aborted:
            assert sequence.tokens == expected(prompt, sequence.request.sampling.max_tokens)
    assert scheduler.blocks.stats().used_num_blocks == 0 and scheduler.held_blocks == 0


def test_a_tier_offers_a_part_of_a_prompt_and_the_rest_is_computed() -> None:
    tier = Tier(random.Random(0))
    scheduler = machine(blocks=16, seqs=2, budget=64, sources=(tier,)).scheduler
    replica = Replica(scheduler, 64, 2, chunked=True)
    sequence, prompt = make("a", list(range(18)), 3), list(range(18))
    tier.keys.update(sequence.extend_keys(SIZE)[:3])
    scheduler.add(sequence)
    assert scheduler.schedule() == [] and sequence.status is SequenceStatus.FETCHING
    [fetch] = scheduler.take_fetches()
    assert (fetch.sequence, fetch.source, fetch.position, fetch.missing) == (sequence, tier, 12, [[0, 1, 2]])
    replica.write(fetch, sequence.tables, 0)
    scheduler.fetched(fetch)
    scheduler.confirm(fetch.sequence)
    assert (sequence.status, sequence.computed, sequence.cached_tokens) == (SequenceStatus.RUNNING, 12, 12)
    replica.run()
    assert sequence.tokens == expected(prompt, 3)


def fetched(*others: Sequence) -> tuple[Scheduler, Sequence]:
    """A sequence for which a tier's two blocks have been read, while `others` wait."""
    tier = Tier(random.Random(0))
    scheduler = machine(blocks=24, seqs=4, budget=64, sources=(tier,)).scheduler
    sequence = make("first", [0] * 10, 3)
    tier.keys.update(sequence.extend_keys(SIZE)[:2])
    scheduler.add(sequence)
    assert scheduler.schedule() == []
    for other in others:
        scheduler.add(other)
    [fetch] = scheduler.take_fetches()
    scheduler.fetched(fetch)
    scheduler.confirm(fetch.sequence)
    return scheduler, sequence


def test_what_was_read_becomes_reusable_a_few_blocks_in_each_step() -> None:
    scheduler, sequence = fetched()
    [pool], keys = scheduler.blocks.pools, sequence.keys
    chunks = scheduler.schedule()
    assert chunks[0].start == 8 and keys[0] not in pool
    scheduler.store_fetched(1)
    scheduler.computed(chunks)
    assert keys[0] in pool and keys[1] not in pool and sequence.stored == 1
    scheduler.store_fetched(1)
    assert keys[1] in pool and sequence.stored == 2


def test_what_was_read_becomes_reusable_at_once_if_others_wait() -> None:
    scheduler, _ = fetched(other := make("other", [0] * 11, 3))
    starts = {chunk.sequence: chunk.start for chunk in scheduler.schedule()}
    assert starts[other] == 8


def test_what_was_read_for_a_sequence_that_has_ended_is_reusable() -> None:
    scheduler, sequence = fetched()
    scheduler.store_fetched(1)
    scheduler.remove(sequence)
    assert all(key in scheduler.blocks.pools[0] for key in sequence.keys[:2])
    scheduler.audit()


def compute(scheduler: Scheduler) -> None:
    """Run a step, of which every token is 7."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        chunk.sequence.tokens += [7] * chunk.sampled
    scheduler.computed(chunks)


def test_what_is_computed_before_what_was_read_is_reusable_follows_it() -> None:
    scheduler, sequence = fetched()
    for _ in range(3):
        compute(scheduler)
    assert sequence.computed == 12 and sequence.stored == 0
    scheduler.remove(sequence)
    assert all(key in scheduler.blocks.pools[0] for key in sequence.extend_keys(SIZE)[:3])
    scheduler.audit()


def test_a_sequence_of_which_only_a_partial_block_was_read_waits_behind_a_long_one() -> None:
    remote = Remote()
    scheduler = machine(blocks=64, seqs=4, budget=64, sources=(remote,)).scheduler
    scheduler.add(earlier := make("earlier", prompt := [1] * 10, 3))
    compute(scheduler)
    scheduler.remove(earlier)
    remote.prompts = {"long", "short"}
    long, short = make_decode("long", [2] * 82, 9, 1.0), make_decode("short", prompt, 9, 2.0)
    for sequence in (long, short):
        scheduler.add(sequence)
    assert scheduler.schedule() == []
    for fetch in scheduler.take_fetches():
        scheduler.fetched(fetch)
        scheduler.confirm(fetch.sequence)
    assert short.stored == 2 and long.stored == 0
    for _ in range(6):
        compute(scheduler)
        scheduler.store_fetched(4)
    keys = [*long.extend_keys(SIZE)[:22], *short.extend_keys(SIZE)[:4]]
    assert (long.stored, short.stored) == (22, 4) and all(key in scheduler.blocks.pools[0] for key in keys)
    scheduler.audit()


def test_blocks_that_are_here_are_not_read_again() -> None:
    tier = Tier(random.Random(0))
    scheduler = machine(blocks=16, seqs=2, budget=64, sources=(tier,)).scheduler
    replica = Replica(scheduler, 64, 2, chunked=True)
    first, second, third = (
        make("first", list(range(9)), 1),
        make("second", list(range(21)), 1),
        make("third", list(range(9)), 1),
    )
    scheduler.add(first)
    replica.run()
    tier.keys.update(second.extend_keys(SIZE)[:4])
    scheduler.add(second)
    scheduler.schedule()
    [fetch] = scheduler.take_fetches()
    assert (fetch.position, fetch.missing) == (16, [[2, 3]])
    tables = scheduler.abandon(second, again=False)
    assert second.status is SequenceStatus.FINISHED and scheduler.orphans == [tables]
    scheduler.release_orphan(tables)
    scheduler.add(third)
    assert len(scheduler.schedule()) == 1 and scheduler.take_fetches() == [], "all that is offered is in the pool"
