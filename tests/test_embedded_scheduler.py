"""The scheduler by property, with arithmetic in place of a model: nothing starves, the budget holds, and preemption changes no output."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.embedded.blocks import BlockPool
from engine.embedded.groups import BlockGroups
from engine.embedded.scheduler import PROMPT_LOGPROB_TOKENS, Scheduler
from engine.embedded.sequence import Sequence
from engine.priority import PRIORITY_SECONDS, rank
from engine.types import GenerateRequest, SamplingParams

SIZE = 4


def make(
    name: str, prompt: list[int], max_tokens: int, *, priority: int = 0, arrival: float = 0.0, prompt_logprobs: bool = False
) -> Sequence:
    request = GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=max_tokens), priority=priority
    )
    return Sequence(
        request=request,
        sampler=None,  # type: ignore[arg-type]
        rank=rank(priority, arrival),
        arrival=arrival,
        tokens=list(prompt),
        prompt_logprobs=[None] if prompt_logprobs else None,
    )


@dataclass
class Machine:
    """Runs a scheduler as the engine does. KV contents are simulated: every block remembers the tokens written to it."""

    scheduler: Scheduler
    budget: int
    max_num_seqs: int
    chunked: bool

    def __post_init__(self) -> None:
        self.memory: dict[tuple[int, int], int] = {}
        self.steps = 0

    def step(self) -> None:
        chunks = self.scheduler.schedule()
        assert chunks, "a step with work must make progress"
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        assert len(self.scheduler.running) <= self.max_num_seqs
        if self.chunked or len(chunks) > 1:
            assert sum(chunk.length for chunk in chunks) <= self.budget
        for chunk in chunks:
            sequence = chunk.sequence
            for position in range(chunk.start, chunk.start + chunk.length):
                self.memory[sequence.blocks[position // SIZE], position % SIZE] = sequence.tokens[position]
        for chunk in chunks:
            self.check_context(chunk.sequence, chunk.start + chunk.length)
            self.scheduler.computed(chunk)
            if chunk.samples:
                chunk.sequence.tokens.append(sum(chunk.sequence.tokens) % 97)
                if chunk.sequence.num_output >= chunk.sequence.request.sampling.max_tokens:
                    self.scheduler.remove(chunk.sequence)
        self.scheduler.audit()
        self.steps += 1

    def check_context(self, sequence: Sequence, end: int) -> None:
        """Attention would read exactly the sequence's own tokens from its blocks."""
        assert [self.memory[sequence.blocks[p // SIZE], p % SIZE] for p in range(end)] == sequence.tokens[:end]

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            assert self.steps < 20_000, "starvation"


def machine(*, blocks: int = 16, seqs: int = 4, budget: int = 16, chunked: bool = True, reuse: bool = True) -> Machine:
    pool = BlockPool(blocks, SIZE, reuse=reuse, publish=lambda _: None)
    return Machine(Scheduler(BlockGroups([pool]), max_num_seqs=seqs, max_num_tokens=budget, chunked_prefill=chunked), budget, seqs, chunked)


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(sum(tokens) % 97)
    return tokens


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.integers(10, 24),
    seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    chunked=st.booleans(),
    reuse=st.booleans(),
)
def test_every_sequence_gets_its_output_whatever_the_pressure(
    seed: int, blocks: int, seqs: int, budget: int, chunked: bool, reuse: bool
) -> None:
    rng = random.Random(seed)
    runner = machine(blocks=blocks, seqs=seqs, budget=max(budget, seqs), chunked=chunked, reuse=reuse)
    shared = [rng.randrange(9) for _ in range(16)]
    sequences = []
    for index in range(rng.randrange(1, 14)):
        prompt = shared[: rng.randrange(0, 17)] + [rng.randrange(9) for _ in range(rng.randrange(1, 12))]
        sequences.append(make(str(index), prompt, rng.randrange(1, 12), priority=rng.randrange(-1, 2), arrival=float(index)))
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
            assert sequence.tokens == expected(list(sequence.request.prompt_token_ids), sequence.request.sampling.max_tokens)
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


def test_a_lower_priority_waits_but_not_for_ever() -> None:
    assert rank(1, arrival=0.0) < rank(0, arrival=PRIORITY_SECONDS + 1)
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
