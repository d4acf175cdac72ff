"""The scheduler by property, with arithmetic in place of a model.

No sequence starves, the budget holds, and preemption changes no output.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.embedded.kv.blocks import BlockPool
from engine.embedded.kv.groups import BlockGroups
from engine.embedded.kv.source import Source
from engine.embedded.scheduler import DECODE_COST, PROMPT_LOGPROB_TOKENS, Scheduler
from engine.embedded.sequence import Sequence
from engine.embedded.step import Chunk
from engine.types import PRIORITY_SECONDS, GenerateRequest, SamplingParams

SIZE = 4


def make(
    name: str,
    prompt: list[int],
    max_tokens: int,
    *,
    priority: int = 0,
    arrival: float = 0.0,
    prompt_logprobs: bool = False,
) -> Sequence:
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        priority=priority,
    )
    return Sequence(
        request=request,
        sampler=None,  # type: ignore[arg-type]
        rank=request.rank(arrival),
        arrival=arrival,
        tokens=list(prompt),
        prompt_logprobs=[None] if prompt_logprobs else None,
    )


Step = list[tuple[Chunk, list[list[int]]]]
"""What the device is given: chunks, and their tables as they are then."""


@dataclass
class Machine:
    """Run a scheduler as the engine does, with `overlap` one step ahead.

    KV contents are simulated: every block of every group remembers the tokens written to it.
    """

    scheduler: Scheduler
    budget: int
    max_num_seqs: int
    chunked: bool
    overlap: bool = False

    def __post_init__(self) -> None:
        self.memory: dict[tuple[int, int, int], int] = {}
        self.steps = 0
        self.launched: Step = []

    def step(self) -> None:
        previous, self.launched = self.launched, self.launch()
        assert previous or self.launched, "a step with work must make progress"
        self.finish(previous)
        if not self.overlap:
            self.finish(self.launched)
            self.launched = []
        self.scheduler.audit()
        self.steps += 1

    def launch(self) -> Step:
        chunks = self.scheduler.schedule()
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        assert len(self.scheduler.running) <= self.max_num_seqs
        if self.chunked or len(chunks) > 1:
            assert sum(chunk.length for chunk in chunks) <= self.budget
        for chunk in chunks:
            chunk.sequence.pending += chunk.sampled
        return [(chunk, [list(table) for table in chunk.sequence.tables]) for chunk in chunks]

    def finish(self, step: Step) -> None:
        for chunk, tables in step:
            end = chunk.start + chunk.length
            for group, table in enumerate(tables):
                for position in range(chunk.start, end):
                    self.memory[group, table[position // SIZE], position % SIZE] = chunk.sequence.tokens[position]
        for chunk, tables in step:
            self.check_context(chunk, tables)
            chunk.sequence.pending -= chunk.sampled
            if chunk.sequence not in (*self.scheduler.running, *self.scheduler.waiting):
                continue
            self.scheduler.computed([chunk])
            if chunk.sampled:
                chunk.sequence.tokens.append(sum(chunk.sequence.tokens) % 97)
                if chunk.sequence.num_output >= chunk.sequence.request.sampling.max_tokens:
                    self.scheduler.remove(chunk.sequence)

    def check_context(self, chunk: Chunk, tables: list[list[int]]) -> None:
        """Attention would read exactly the sequence's own tokens from its blocks, as far as its layers look back."""
        for group, (pool, table) in enumerate(zip(self.scheduler.blocks.pools, tables, strict=True)):
            seen = range(max(0, chunk.start - (pool.window or 1000) + 1), chunk.start + chunk.length)
            read = [self.memory[group, table[position // SIZE], position % SIZE] for position in seen]
            assert read == chunk.sequence.tokens[seen.start : seen.stop]

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            assert self.steps < 20_000, "starvation"


Windows = tuple[int | None, ...]


def machine(
    *,
    blocks: int = 16,
    seqs: int = 4,
    budget: int = 16,
    chunked: bool = True,
    reuse: bool = True,
    windows: Windows = (None,),
    overlap: bool = False,
    sources: tuple[Source, ...] = (),
    prompt_budget: int | None = None,
    small_step: int = 0,
    rest_after: int | None = None,
) -> Machine:
    pools = [BlockPool(blocks, SIZE, reuse=reuse, publish=lambda _: None, window=window) for window in windows]
    scheduler = Scheduler(
        BlockGroups(pools),
        max_num_seqs=seqs,
        max_num_tokens=budget,
        max_prompt_tokens=prompt_budget or budget,
        chunked_prefill=chunked,
        small_step=small_step,
        rest_after=rest_after,
        sources=sources,
    )
    return Machine(scheduler, budget, seqs, chunked, overlap)


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(sum(tokens) % 97)
    return tokens


UNDER_PRESSURE: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 10_000),
    "blocks": st.integers(10, 24),
    "seqs": st.integers(1, 6),
    "budget": st.integers(1, 40),
    "flags": st.tuples(st.booleans(), st.booleans(), st.booleans()),
    "windows": st.sampled_from([(None,), (None, 1), (None, 6), (None, 3, 10), (5,), (4, 12)]),
}


@settings(max_examples=300, deadline=None)
@given(**UNDER_PRESSURE)
def test_every_sequence_gets_its_output_whatever_the_pressure(
    seed: int, blocks: int, seqs: int, budget: int, flags: tuple[bool, bool, bool], windows: Windows
) -> None:
    rng = random.Random(seed)
    chunked, reuse, overlap = flags
    runner = machine(
        blocks=blocks,
        seqs=seqs,
        budget=max(budget, seqs),
        chunked=chunked,
        reuse=reuse,
        windows=windows,
        overlap=overlap,
        prompt_budget=1 + seed % budget,
        small_step=rng.choice([0, 4]),
        rest_after=rng.choice([None, 0, 3, 8]),
    )
    shared = [rng.randrange(9) for _ in range(16)]
    sequences = []
    for index in range(rng.randrange(1, 14)):
        prompt = shared[: rng.randrange(0, 17)] + [rng.randrange(9) for _ in range(rng.randrange(1, 12))]
        sequences.append(
            make(str(index), prompt, rng.randrange(1, 12), priority=rng.randrange(-1, 2), arrival=float(index))
        )
    pending = list(sequences)
    aborted = set()
    while pending or runner.scheduler.running or runner.scheduler.waiting:
        for _ in range(min(len(pending), rng.randrange(0, 3))):
            runner.scheduler.add(pending.pop(0))
        alive = [*runner.scheduler.running, *runner.scheduler.waiting]
        if alive and rng.random() < 0.02:
            victim = rng.choice(alive)
            runner.scheduler.remove(victim)
            aborted.add(victim.request.request_id)
        elif alive:
            runner.step()
        assert runner.steps < 20_000, "starvation"
    for sequence in sequences:
        if sequence.request.request_id not in aborted:
            assert sequence.tokens == expected(
                list(sequence.request.prompt_token_ids), sequence.request.sampling.max_tokens
            )
    assert runner.scheduler.blocks.stats().used_num_blocks == 0


def test_pressure_preempts_the_last_and_spares_the_first() -> None:
    runner = machine(blocks=8, seqs=2, reuse=False)
    first, second = make("first", [1] * 8, 20, arrival=0.0), make("second", [2] * 8, 20, arrival=1.0)
    runner.scheduler.add(first)
    runner.scheduler.add(second)
    while runner.scheduler.preemptions == 0:
        runner.step()
    assert runner.scheduler.running == [first]
    assert runner.scheduler.waiting == [second]
    runner.run()
    assert second.num_output == 20


def test_equal_prompts_are_computed_once_even_when_they_come_together() -> None:
    runner = machine(blocks=32, seqs=8, budget=64)
    prompt = list(range(17))
    sequences = [make(str(index), prompt, 2, arrival=float(index)) for index in range(5)]
    for sequence in sequences:
        runner.scheduler.add(sequence)
    runner.step()
    assert runner.scheduler.running == sequences[:1]
    runner.run()
    assert [sequence.cached_tokens for sequence in sequences] == [0, 16, 16, 16, 16]


def test_decodes_go_first_and_long_prompts_take_the_rest_of_the_budget() -> None:
    runner = machine(blocks=64, budget=10)
    decoding, long = make("decoding", [1, 2], 50, arrival=0.0), make("long", list(range(60)), 1, arrival=1.0)
    runner.scheduler.add(decoding)
    runner.step()
    runner.scheduler.add(long)
    chunks = runner.scheduler.schedule()
    assert [(chunk.sequence, chunk.length) for chunk in chunks] == [(decoding, 1), (long, 9)]


def lengths(chunks: list[Chunk]) -> dict[str, int]:
    return {chunk.sequence.request.request_id: chunk.length for chunk in chunks}


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    runner = machine(blocks=400, budget=64)
    long, short = make("long", list(range(1000)), 1, arrival=0.0), make("short", [1] * 30, 2, arrival=1.0)
    runner.scheduler.add(long)
    runner.step()
    runner.scheduler.add(short)
    runner.step()
    assert (short.num_output, long.computed) == (1, 64 + 34)
    runner.run()
    assert (long.tokens, short.tokens) == (expected(list(range(1000)), 1), expected([1] * 30, 2))


def test_a_long_prompt_ahead_in_the_queue_does_not_keep_a_short_one_waiting() -> None:
    runner = machine(blocks=1000, seqs=8, budget=64)
    for index in range(4):
        runner.scheduler.add(make(f"long {index}", list(range(index, 600 + index)), 1, arrival=float(index)))
    runner.step()
    short = make("short", [1] * 30, 1, arrival=9.0)
    runner.scheduler.add(short)
    while not short.num_output:
        runner.step()
    assert runner.steps <= 5
    assert lengths(runner.scheduler.schedule()) == {"long 0": 64}, "of equals the first goes on alone"


def test_prompts_go_on_shortest_first_and_the_first_keeps_its_share() -> None:
    runner = machine(blocks=1000, seqs=8, budget=64)
    for name, length in (("first", 900), ("second", 500), ("third", 300)):
        runner.scheduler.add(make(name, [length + index for index in range(length)], 1))
        runner.step()
    assert lengths(runner.scheduler.schedule()) == {"first": 32, "third": 32}


def test_short_prompts_without_end_leave_a_long_one_a_quarter() -> None:
    runner = machine(blocks=1000, seqs=8, budget=64)
    long = make("long", list(range(1000)), 1)
    runner.scheduler.add(long)
    for index in range(1000):
        if long.num_output:
            break
        runner.scheduler.add(make(str(index), [index] * 50, 1, arrival=1.0 + index))
        runner.scheduler.add(make(f"{index} too", [index, 1] * 25, 1, arrival=1.0 + index))
        runner.step()
    assert runner.steps <= 4 * 1000 / 64 + 1


def test_a_long_prompt_keeps_its_budget_when_no_other_can_start() -> None:
    for options in ({"blocks": 260, "seqs": 4}, {"blocks": 1000, "seqs": 1}):
        runner = machine(budget=64, **options)
        runner.scheduler.add(make("long", list(range(1000)), 1))
        runner.step()
        runner.scheduler.add(make("short", [1] * 50, 1, arrival=1.0))
        assert lengths(runner.scheduler.schedule()) == {"long": 64}


def test_prompts_have_a_budget_of_their_own() -> None:
    runner = machine(blocks=400, seqs=4, budget=64, prompt_budget=16)
    for index in range(3):
        runner.scheduler.add(make(str(index), [index], 20))
    runner.step()
    runner.scheduler.add(make("long", list(range(1000)), 1, arrival=1.0))
    assert lengths(runner.scheduler.schedule()) == {"0": 1, "1": 1, "2": 1, "long": 16}


@pytest.mark.parametrize(
    ("decoding", "waiting", "taken"),
    [
        pytest.param(0, [100], 64, id="nothing decodes"),
        pytest.param(2, [100], 14, id="beside decodes"),
        pytest.param(2, [50, 50], 14, id="several prompts"),
        pytest.param(2, [50, 90], 62, id="more waits than two large steps take"),
        pytest.param(6, [100], 58, id="more may come than small steps compute"),
    ],
)
def test_prompts_fill_small_steps_beside_decodes(decoding: int, waiting: list[int], taken: int) -> None:
    runner = machine(blocks=400, seqs=8, budget=64, small_step=16)
    for index in range(decoding):
        runner.scheduler.add(make(str(index), [index], 20))
    if decoding:
        runner.step()
    for index, length in enumerate(waiting):
        runner.scheduler.add(make(f"prompt {index}", [index] * length, 1, arrival=1.0))
    found = lengths(runner.scheduler.schedule())
    assert sum(length for name, length in found.items() if name.startswith("prompt")) == taken


@pytest.mark.parametrize(
    ("small_step", "waiting", "taken"),
    [
        pytest.param(
            16,
            [40, 40, 10, *[50] * 4],
            [{"0": 40}, {"1": 40, "2": 10}, {"3": 50}, {"4": 50, "5": 10}],
            id="most is used",
        ),
        pytest.param(16, [20, 60, *[50] * 4], [{"0": 20, "1": 40}, {"1": 20, "2": 40}], id="most is left"),
        pytest.param(16, [40, 100, *[50] * 4], [{"0": 40, "1": 20}, {"1": 30, "2": 30}], id="no step has room for all"),
        pytest.param(16, [40, 40, 10], [{"0": 40, "1": 20}], id="few wait"),
        pytest.param(0, [40, 40, *[50] * 4], [{"0": 40, "1": 20}, {"1": 20, "2": 40}], id="no step is small"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_prompt_that_ends_in_the_next_large_step_begins_there(
    small_step: int, waiting: list[int], taken: list[dict[str, int]], tokens: int
) -> None:
    runner = machine(blocks=400, seqs=8, budget=64, prompt_budget=60, small_step=small_step)
    for index, length in enumerate(waiting):
        runner.scheduler.add(make(str(index), [index] * length, tokens, arrival=float(index)))
    found = []
    for _ in taken:
        step = runner.launch()
        found.append({name: length for name, length in lengths([chunk for chunk, _ in step]).items() if length > 1})
        runner.finish(step)
    assert found == taken


def test_a_step_has_no_more_tokens_than_asked_for() -> None:
    runner = machine(blocks=400, seqs=8, budget=64)
    for index in range(3):
        runner.scheduler.add(make(str(index), [index], 20))
    runner.step()
    runner.scheduler.add(make("prompt", [7] * 100, 1, arrival=1.0))
    assert lengths(runner.scheduler.schedule(10)) == {"0": 1, "1": 1, "2": 1, "prompt": 7}


@pytest.mark.parametrize(
    ("seqs", "prompt", "drafted", "taken"),
    [
        pytest.param(8, 100, 15, 15, id="a prompt waits"),
        pytest.param(8, 0, 30, 0, id="none waits"),
        pytest.param(2, 100, 30, 0, id="it has no slot"),
    ],
)
def test_drafts_leave_half_of_what_decodes_do_to_prompts(seqs: int, prompt: int, drafted: int, taken: int) -> None:
    """Or prompts would wait until the decodes before them have ended."""
    runner = machine(blocks=400, seqs=seqs, budget=32)
    runner.scheduler.add(make("a", [1], 100))
    runner.scheduler.add(make("b", [2], 100))
    runner.step()
    for sequence in runner.scheduler.running:
        sequence.draft = [1] * 20
    if prompt:
        runner.scheduler.add(make("prompt", [7] * prompt, 1, arrival=1.0))
    found = lengths(runner.scheduler.schedule())
    assert (found["a"] + found["b"], found.get("prompt", 0)) == (2 + drafted, taken)


@pytest.mark.parametrize(
    ("budget", "others", "drafted", "rounds"),
    [
        pytest.param(64, False, 11, 3, id="all of them"),
        pytest.param(22, False, 11, 2, id="one sequence has room for two"),
        pytest.param(14, False, 11, 0, id="one has no room"),
        pytest.param(64, True, 11, 0, id="a prompt began"),
        pytest.param(64, False, 0, 0, id="nothing was planned"),
    ],
)
def test_all_sequences_have_as_many_rounds_of_drafts(budget: int, others: bool, drafted: int, rounds: int) -> None:
    """Only what fits is computed: the next step begins behind it."""
    runner = machine(blocks=400, seqs=8, budget=64)
    for name in "ab":
        runner.scheduler.add(make(name, [ord(name)], 100))
    runner.step()
    sequences = list(runner.scheduler.running)
    known = [len(sequence.tokens) for sequence in sequences]
    for sequence in sequences:
        sequence.draft = [0] * drafted
    if others:
        runner.scheduler.add(make("prompt", [7] * 9, 1, arrival=1.0))
    chunks = runner.scheduler.schedule(budget)
    found, fitting = runner.scheduler.fit_rounds(chunks, sequences, 3)
    length = max(4 * rounds, 1)
    assert found == rounds
    for sequence, count in zip(sequences, known, strict=True):
        (chunk,) = (chunk for chunk in fitting if chunk.sequence is sequence)
        assert (chunk.start, chunk.length, chunk.sampled, len(chunk.draft)) == (count - 1, length, length, length - 1)
        assert sequence.computed == count - 1 + length


def test_prompts_take_another_number_of_tokens_where_nothing_decodes() -> None:
    runner = machine(blocks=400, seqs=4, budget=64, prompt_budget=16)
    runner.scheduler.prompt_tokens_alone = 40
    long = make("long", list(range(200)), 2)
    runner.scheduler.add(long)
    runner.step()
    runner.scheduler.add(make("decoding", [1, 2], 50, priority=1))
    runner.step()
    assert long.computed == 40 + 38
    runner.step()
    assert long.computed == 40 + 38 + 16


def test_prompts_take_another_number_of_tokens_beside_decodes_while_many_wait() -> None:
    runner = machine(blocks=400, seqs=4, budget=64, prompt_budget=16)
    runner.scheduler.add(make("decoding", [1, 2], 50))
    runner.step()
    runner.scheduler.prompt_tokens_crowded = 32
    long = make("long", list(range(130)), 2, arrival=1.0)
    runner.scheduler.add(long)
    computed = []
    for _ in range(5):
        runner.step()
        computed.append(long.computed)
    assert computed == [32, 64, 96, 112, 128], "more than 64 tokens wait before the first three steps"


def test_a_long_prompt_rests_while_others_decode_as_long() -> None:
    runner = machine(blocks=400, seqs=4, budget=68, prompt_budget=64, rest_after=128)
    decoding, long = make("decoding", [1], 300), make("long", list(range(1000)), 1, arrival=1.0)
    runner.scheduler.add(decoding)
    runner.step()
    runner.scheduler.add(long)
    taken = []
    while not long.num_output:
        before = long.computed
        runner.step()
        taken.append(long.computed - before)
    rest = 64 // DECODE_COST
    assert taken[: 3 + 2 * (rest + 1)] == [64, 64, 64, *[0] * rest, 64, *[0] * rest, 64]
    assert decoding.num_output == 1 + len(taken)


def test_a_resting_prompt_lets_short_ones_pass_and_goes_on_alone() -> None:
    runner = machine(blocks=400, seqs=4, budget=64, rest_after=64)
    long = make("long", list(range(1000)), 1)
    runner.scheduler.add(long)
    for _ in range(3):
        runner.step()
    assert long.computed == 3 * 64, "nobody waits"
    short = make("short", [1] * 70, 1, arrival=1.0)
    runner.scheduler.add(short)
    runner.step()
    assert lengths(runner.scheduler.schedule()) == {"short": 38}
    assert (long.computed, short.computed) == (3 * 64 + 32, 70)


def test_a_lower_priority_waits_but_not_for_ever() -> None:
    low, urgent = (make("", [1], 1, priority=priority).request for priority in (1, 0))
    assert low.rank(arrival=0.0) < urgent.rank(arrival=PRIORITY_SECONDS + 1)
    runner = machine(seqs=1)
    late, urgent = make("late", [1], 1, priority=1, arrival=0.0), make("urgent", [2], 1, arrival=5.0)
    runner.scheduler.add(late)
    runner.scheduler.add(urgent)
    assert runner.scheduler.schedule()[0].sequence is urgent


@pytest.mark.parametrize("reuse", [True, False])
def test_prompt_logprobs_compute_the_whole_prompt_in_bounded_chunks(reuse: bool) -> None:
    runner = machine(blocks=300, budget=1000, reuse=reuse)
    prompt = list(range(600))
    runner.scheduler.add(make("warm", prompt, 1))
    runner.run()
    runner.scheduler.add(make("reported", prompt, 1, prompt_logprobs=True))
    chunk = runner.scheduler.schedule()[0]
    assert (chunk.start, chunk.length) == (0, PROMPT_LOGPROB_TOKENS)


def test_a_prompt_that_goes_on_may_take_the_blocks_of_a_decode_in_the_same_step() -> None:
    runner = machine(blocks=6, seqs=6, windows=(9,), overlap=True, reuse=False)
    decodes = [make(str(index), [index] * 3, 12, priority=-1, arrival=float(index)) for index in range(4)]
    for sequence in decodes:
        runner.scheduler.add(sequence)
    runner.step()
    runner.step()
    prompt = make("prompt", list(range(30)), 2)
    runner.scheduler.add(prompt)
    runner.run()
    assert runner.scheduler.preemptions > 0
    assert prompt.tokens == expected(list(range(30)), 2)
    assert [sequence.tokens for sequence in decodes] == [expected([index] * 3, 12) for index in range(4)]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_window_bounds_no_sequence(chunked: bool, overlap: bool) -> None:
    """24 tokens fit into the pool; a chunk is as long as it, the one before and the window fit."""
    runner = machine(blocks=6, seqs=1, budget=64, chunked=chunked, windows=(6,), overlap=overlap)
    sequence = make("long", list(range(100)), 40)
    runner.scheduler.add(sequence)
    runner.run()
    assert sequence.tokens == expected(list(range(100)), 40)
    assert runner.scheduler.preemptions == 0
    assert runner.scheduler.blocks.capacity > 1 << 60


def test_while_a_sequence_goes_on_it_holds_a_window() -> None:
    runner = machine(blocks=64, budget=8, windows=(None, 10))
    sequence = make("long", list(range(90)), 60)
    runner.scheduler.add(sequence)
    whole, window = runner.scheduler.blocks.pools
    while sequence.num_output < 59:
        runner.step()
        assert window.used <= 10 // SIZE + 2, "after a step, the window and what lies within its first and last block"
        assert sequence.remaining > 1 or whole.used == -(-sequence.computed // SIZE)


def test_a_prefix_is_taken_up_where_every_window_still_has_what_comes_before() -> None:
    """Blocks behind the window are evicted first.

    Three of them are left when the pool needs room; what the last block attends to is still there.
    """
    runner = machine(blocks=12, seqs=1, budget=8, windows=(None, 6))
    prompt = list(range(32))
    first, again, shorter = (
        make(name, prompt[:length], 1) for name, length in (("first", 32), ("again", 32), ("shorter", 13))
    )
    for sequence in (first, again):
        runner.scheduler.add(sequence)
        runner.run()
    assert (first.cached_tokens, again.cached_tokens) == (0, 28)
    window = runner.scheduler.blocks.pools[1]
    taken = window.allocate(window.available - 3)  # the least recently used are those left behind first
    window.release(taken)
    keys = shorter.extend_keys(SIZE)
    assert [key in runner.scheduler.blocks.pools[0] for key in keys] == [True] * 3
    runner.scheduler.add(shorter)
    runner.run()
    assert shorter.cached_tokens == 0
    stats = runner.scheduler.blocks.stats()
    assert (stats.max_num_blocks, stats.reused_blocks, stats.missed_blocks) == (24, 7, 8 + 1 + 4)
