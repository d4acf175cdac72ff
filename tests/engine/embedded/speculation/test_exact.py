"""With any drafts, a sequence gets the same tokens, log-probabilities and end as without drafts."""

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded import loaded_model
from engine.embedded.core import EngineCore
from engine.embedded.grammar.compiler import Matcher
from engine.embedded.grammar.library import Bitmask
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.embedded.speculation import costs
from engine.embedded.speculation.drafter import Draft
from engine.embedded.speculation.speculator import Speculator
from engine.kit.logits import register
from engine.kv_events import KvEvent
from engine.types import Delta, GenerateRequest, Guide, ReasoningBudget, SamplingParams
from tests.engine.embedded.test_equivalence import run, tokens

VOCAB, EOS, CONTEXT, BLOCK = 256, 2, 128, 8
OUTPUT = 20
PROMPT = tuple(range(10, 40))


class Turns:
    """A grammar in which the remainders of ids by 3 take turns, as a `Compiled` and as its own `Position`."""

    num_bytes = 0
    error = ""
    together = None

    def __init__(self) -> None:
        self._count = 0

    def start(self) -> "Turns":
        return Turns()

    def fill(self, bitmask: Bitmask, row: int) -> None:
        bitmask[row] = 0
        for token in range(3, VOCAB):
            if token % 3 == self._count % 3:
                bitmask[row, token // 32] |= 1 << token % 32 if token % 32 < 31 else -(2**31)

    def allows(self, token_id: int) -> bool:
        return token_id >= 3 and token_id % 3 == self._count % 3

    def accept(self, token_id: int) -> bool:
        accepted = token_id % 3 == self._count % 3
        self._count += accepted
        return accepted

    def may_end(self) -> bool:
        return False


class Counting:
    """A logits processor with a state: it pushes ids that follow from how often it was called."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, token_ids: tuple[int, ...], logits: torch.Tensor) -> None:
        self._calls += 1
        logits[(7 * self._calls + len(token_ids)) % VOCAB] += 3


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
    "penalised": {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "logprobs": {"logprobs": 3},
    "biased": {"logit_bias": {EOS: 4.0, 50: 1.0}, "ignore_eos": False, "temperature": 1.0, "min_tokens": 4},
    "banned": {"bad_words": ((11,), (12, 13), (60, 61)), "temperature": 1.5},
    "stopped": {"stop_token_ids": tuple(range(0, VOCAB, 9)), "temperature": 1.0},
    "processed": {"processors": ("counting",), "temperature": 0.5},
    "guided": {"guide": Guide("regex", "turns"), "temperature": 1.0, "logprobs": 0},
    "reasoning": {
        "temperature": 1.0,
        "reasoning_budget": ReasoningBudget(5, (20, 21, 22), (23,), True, {0: {30: 1}, 1: {20: 0}}),
    },
    "short": {"max_tokens": 2},
    "none": {"max_tokens": 0},
    "reported": {"prompt_logprobs": 1, "max_tokens": 5},
    "long": {"max_tokens": CONTEXT - len(PROMPT), "temperature": 1.0},
}


NARROW = {"num_blocks": 18, "enable_block_reuse": False}
"""Blocks for one of the longer requests."""


class Guesser:
    """A drafter that knows the answers, and is right as often as it is told: `wrongs` are the places of the first
    wrong tokens of one draft after another, `lengths` the lengths."""

    free = True
    runner = None

    def __init__(self, answers: dict[str, list[int]], lengths: Many[int], wrongs: Many[int]) -> None:
        self._answers = answers
        self._lengths = itertools.cycle(lengths)
        self._wrongs = itertools.cycle(wrongs)
        self.known: set[Sequence] = set()

    def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
        drafts = []
        for sequence, limit in zip(sequences, limits, strict=True):
            self.known.add(sequence)
            answer = self._answers[sequence.request.request_id][sequence.num_output :] + [5] * CONTEXT
            tokens = answer[: min(limit, next(self._lengths))]
            if (wrong := next(self._wrongs)) < len(tokens):
                tokens[wrong] = (tokens[wrong] + 1) % VOCAB
            drafts.append(Draft(tokens, [0] * len(tokens)))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that both the native and the torch runner compute."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, eos_token_id=EOS, initializer_range=0.15,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def processor() -> None:
    register("counting", Counting)


def make_core(
    folder: Path, guesser: Guesser | None = None, publish: Callable[[KvEvent], None] = lambda _: None, **options: Any
) -> EngineCore:
    config = EmbeddedConfig(
        model=str(folder),
        **{"dtype": "float32", "threads": 1, "num_blocks": 200, "kv_block_size": BLOCK, **options},
    )
    with pytest.MonkeyPatch.context() as patch:
        if guesser is not None:
            speculator = Speculator(guesser, most=8, min_speedup=0, context_length=CONTEXT)
            patch.setattr(loaded_model, "create_speculator", lambda *_: speculator)
        return EngineCore(config, publish)


def add(core: EngineCore, name: str, prompt: tuple[int, ...] = PROMPT, **asked: Any) -> None:
    params = SamplingParams(**{"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True, **asked})
    matcher = None
    if params.guide is not None:
        matcher = Matcher((EOS,), Turns())
        matcher.allowance = 60
    request = GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=params)
    state = SamplerState(params, prompt, (EOS,), params.seed or len(name), matcher, VOCAB, core.runner.device)
    logprobs = None if params.prompt_logprobs is None else [None]
    core.add(
        Sequence(request=request, sampler=state, rank=0.0, arrival=0.0, tokens=list(prompt), prompt_logprobs=logprobs)
    )


def said(deltas: list[Delta]) -> tuple[Any, ...]:
    """All that a client can see of an answer, in a form that rounding does not change."""
    logprobs = [
        [(entry.token_id, entry.rank, pytest.approx(entry.logprob, abs=1e-3)) for entry in entries]
        for delta in deltas
        for entries in delta.logprobs
    ]
    return tokens(deltas), logprobs, deltas[-1].finish_reason, deltas[-1].stop_reason


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[Delta]]:
    core = make_core(folder)
    for name, asked in REQUESTS.items():
        add(core, name, **asked)
    return run(core)


@pytest.fixture(scope="module")
def answers(plain: dict[str, list[Delta]]) -> dict[str, list[int]]:
    return {name: tokens(deltas) for name, deltas in plain.items()}


def test_the_requests_differ_as_they_should(plain: dict[str, list[Delta]]) -> None:
    assert len({tuple(tokens(deltas)) for deltas in plain.values()}) == len(plain) - 1, "logprobs is greedy"
    assert {deltas[-1].finish_reason for deltas in plain.values()} == {"length", "stop"}
    assert len(tokens(plain["long"])) == CONTEXT - len(PROMPT)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="native"),
        pytest.param({"overlap_scheduler": "on"}, id="overlap"),
        pytest.param({"attention": "sdpa"}, id="torch"),
        pytest.param({"attention": "sdpa", "overlap_scheduler": "on"}, id="torch, overlap"),
        pytest.param(NARROW, id="preempted"),
        pytest.param(NARROW | {"overlap_scheduler": "on"}, id="preempted, overlap"),
        pytest.param({"max_num_tokens": 20, "max_batch_size": 10}, id="few tokens in a step"),
    ],
)
def test_every_request_says_the_same(
    folder: Path, plain: dict[str, list[Delta]], answers: dict[str, list[int]], options: dict[str, Any]
) -> None:
    guesser = Guesser(answers, [8, 3, 1, 5], [9, 9, 0, 2, 9])
    core = make_core(folder, guesser, **options)
    for name, asked in REQUESTS.items():
        add(core, name, **asked)
    found = run(core)
    assert {name: said(deltas) for name, deltas in found.items()} == {
        name: said(deltas) for name, deltas in plain.items()
    }
    stats = core.stats()
    assert stats.spec_decoding_stats is not None and stats.kv_cache_stats.used_num_blocks == 0
    assert stats.spec_decoding_stats.num_accepted_tokens > 20
    assert (stats.num_preemptions > 0) == ("num_blocks" in options)
    assert not guesser.known, "what is kept of a sequence goes with it"
    assert stats.iteration < sum(map(len, answers.values()))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    wrongs=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    names=st.sets(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=4),
    overlap=st.sampled_from(["on", "off"]),
    min_speedup=st.sampled_from([0.0, 0.01]),
)
def test_any_draft_gives_the_same(
    cores: dict[str, EngineCore],
    plain: dict[str, list[Delta]],
    answers: dict[str, list[int]],
    lengths: list[int],
    wrongs: list[int],
    names: set[str],
    overlap: str,
    min_speedup: float,
) -> None:
    """Also where turns with speculation and pauses follow each other quickly."""
    core = cores[overlap]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "TURN", 5)
        patch.setattr(costs, "SHORTEST_PAUSE", 4)
        guesser = Guesser(answers, lengths, wrongs)
        core.speculator = Speculator(guesser, most=8, min_speedup=min_speedup, context_length=CONTEXT)
        for name in names:
            add(core, name, **REQUESTS[name])
        found = run(core)
    assert {name: said(deltas) for name, deltas in found.items()} == {name: said(plain[name]) for name in names}


@pytest.fixture(scope="module")
def cores(folder: Path) -> dict[str, EngineCore]:
    return {overlap: make_core(folder, Guesser({}, [1], [1]), overlap_scheduler=overlap) for overlap in ("on", "off")}


def test_the_prefix_cache_has_no_rejected_tokens(folder: Path, answers: dict[str, list[int]]) -> None:
    """A second request finds the first one's blocks, and says the same."""
    stored: list[Any] = []
    guesser = Guesser(answers | {"again": answers["long"]}, [8], [3, 0, 5])
    core = make_core(folder, guesser, stored.append)
    add(core, "long", **REQUESTS["long"])
    run(core)
    whole = [*PROMPT, *answers["long"]]
    blocks = [
        tuple(token.token_id for token in block.tokens)
        for event in stored
        for block in getattr(event.data, "blocks", ())
    ]
    assert blocks == [tuple(whole[i : i + BLOCK]) for i in range(0, len(whole) - BLOCK, BLOCK)]
    add(core, "again", prompt=tuple(whole[:60]), max_tokens=4, temperature=0.0)
    alone = make_core(folder)
    add(alone, "again", prompt=tuple(whole[:60]), max_tokens=4, temperature=0.0)
    again, fresh = run(core)["again"], run(alone)["again"]
    assert again[0].prompt is not None and again[0].prompt.cached_tokens == 56
    assert tokens(again) == tokens(fresh)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_sequence_can_be_aborted_at_any_step(folder: Path, answers: dict[str, list[int]], overlap: str) -> None:
    guesser = Guesser(answers, [8, 2], [4, 9])
    core = make_core(folder, guesser, overlap_scheduler=overlap)
    for steps in range(1, 6):
        add(core, "long", **REQUESTS["long"])
        add(core, "greedy")
        found: list[Delta] = []
        for _ in range(steps):
            found += [delta for name, delta in core.step() if name == "greedy" and isinstance(delta, Delta)]
        core.abort("long")
        found += run(core)["greedy"]
        assert tokens(found) == answers["greedy"]
        assert core.stats().kv_cache_stats.used_num_blocks == 0 and not guesser.known


def test_the_last_delta_counts_the_drafted_tokens_of_a_choice(folder: Path, answers: dict[str, list[int]]) -> None:
    core = make_core(folder, Guesser(answers, [4], [2]))
    add(core, "greedy")
    deltas = run(core)["greedy"]
    performance, stats = deltas[-1].performance, core.stats().spec_decoding_stats
    assert performance is not None and stats is not None
    assert all(delta.performance is None for delta in deltas[:-1])
    assert (performance.draft_tokens, performance.accepted_tokens) == (
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
    )
    assert stats.accepted_per_position[0] == stats.num_drafts and not any(stats.accepted_per_position[2:])
    assert [len(delta.token_ids) for delta in deltas[1:-1]] == [3] * (len(deltas) - 2)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
