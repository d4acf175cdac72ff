"""Prefill and decode by two cores of the embedded engine, with real transfers. Together they generate the same tokens
as one core.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.handoff import leases
from engine.embedded.models.native.runner import NativeRunner
from engine.kv_events import Stored
from engine.types import Delta, GenerateRequest
from tests.engine.embedded.models.native.conftest import level  # noqa: F401 - a fixture
from tests.engine.embedded.models.native.test_native import make_folder, rounds
from tests.support.handoff import OPTIONS, Deltas, pair_of, request_of, sequence_of, step, tokens
from tests.support.window_models import save

SMALL: dict[str, Any] = {"kv_block_size": 8, "num_blocks": 300}
_rng = random.Random(1)


def prompt_of(length: int) -> list[int]:
    return [_rng.randrange(3, 330) for _ in range(length)]


SHARED = prompt_of(70)
PROMPTS = [
    (SHARED if index % 3 == 0 else []) + prompt_of(_rng.choice([1, 7, 8, 31, 32, 33, 64, 150])) for index in range(24)
]
LONGEST = max(len(prompt) for prompt in PROMPTS)


def alone(folder: Path, requests: list[GenerateRequest], **options: Any) -> Deltas:
    """What one core generates."""
    core = EngineCore(
        EmbeddedConfig(model=str(folder), **{**OPTIONS, "kv_transfer": "", **SMALL, **options}), lambda _: None
    )
    deltas: Deltas = {}
    for request in requests:
        core.add(sequence_of(core, request))
    while core.busy:
        for name, delta in step(core):
            deltas.setdefault(name, []).append(delta)
    return deltas


def spoken(deltas: list[Delta]) -> tuple[Any, ...]:
    """All but how a prompt came to be computed, and how deltas are cut; log-probabilities to four digits."""
    entries = [
        [(item.token_id, item.rank, round(item.logprob, 4)) for item in entry]
        for delta in deltas
        for entry in delta.logprobs
    ]
    prompt = deltas[0].prompt
    assert prompt is not None and all(delta.prompt is None for delta in deltas[1:])
    return tokens(deltas), entries, deltas[-1].finish_reason, deltas[-1].stop_reason, prompt.logprobs is None


def greedy_requests() -> list[GenerateRequest]:
    return [request_of(str(index), prompt) for index, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    return {name: tokens(deltas) for name, deltas in alone(tiny_model, greedy_requests()).items()}


@pytest.fixture(params=[False, True], ids=["at the end", "early"])
def early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether blocks are read while the prompt is computed."""
    monkeypatch.setattr(leases, "EARLY_TOKENS", 1)
    is_early: bool = request.param
    return is_early


PRESSED: dict[str, Any] = {"num_blocks": LONGEST // 8 + 4}
"""Blocks for the longest prompt and little more."""


@pytest.mark.parametrize(
    ("prefill", "decode", "overlap"),
    [
        pytest.param({"max_num_tokens": 16, **PRESSED}, {"max_num_tokens": 60, **PRESSED}, "on", id="chunked, pressed"),
        pytest.param({"enable_block_reuse": False}, {"enable_block_reuse": False, **PRESSED}, "off", id="no reuse"),
        pytest.param({"enable_block_reuse": False}, {"max_batch_size": 3}, "on", id="reuse on one side"),
        pytest.param(
            {"max_num_tokens": 50, "enable_chunked_prefill": False},
            {"max_num_tokens": 2, "max_batch_size": 2},
            "off",
            id="unchunked",
        ),
    ],
)
def test_greedy_equals_one_core_however_it_is_scheduled(
    tiny_model: Path,
    expected: dict[str, list[int]],
    prefill: dict[str, Any],
    decode: dict[str, Any],
    overlap: str,
    early: bool,
) -> None:
    common = {**SMALL, "overlap_scheduler": overlap}
    with pair_of(tiny_model, {**common, **prefill}, {**common, **decode}) as pair:
        deltas = pair.serve(greedy_requests(), early=early)
        stats = pair.decode.stats()
        assert bool(pair.early) == early
    assert {name: tokens(said) for name, said in deltas.items()} == expected
    assert (stats.kv_transfer_failure_total, stats.num_completed_requests) == (0, len(PROMPTS))
    assert 0 < stats.kv_transfer_success_total <= len(PROMPTS)
    assert (stats.num_preemptions > 0) == ("num_blocks" in decode)


@pytest.fixture(scope="module", params=[("gemma3_text", "on"), ("mistral", "off")], ids="-".join)
def windowed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, dict[str, list[int]]]:
    """A model with windows, whether steps overlap, and what one core generates."""
    kind, overlap = request.param
    folder = save(kind, tmp_path_factory.mktemp(kind))
    return folder, overlap, {name: tokens(said) for name, said in alone(folder, greedy_requests()).items()}


def test_windows_hand_over_what_is_still_attended_to(
    windowed: tuple[Path, str, dict[str, list[int]]], early: bool
) -> None:
    folder, overlap, expected = windowed
    common = {**SMALL, "overlap_scheduler": overlap, "max_num_tokens": 60}
    with pair_of(folder, common, {**common, "num_blocks": LONGEST // 8 + 6}) as pair:
        for _ in range(2):
            deltas = pair.serve(greedy_requests(), early=early)
            assert not pair.early, "blocks behind a window are given up while the prompt is computed"
            assert {name: tokens(said) for name, said in deltas.items()} == expected
        assert pair.decode.stats().kv_transfer_failure_total == 0


def test_the_compiled_path_hands_over_too(tmp_path: Path, level: str) -> None:  # noqa: F811 - the fixture
    """Also to a replica on another processor: blocks are laid out alike for every instruction set."""
    folder = make_folder(tmp_path)
    sizes = {"kv_block_size": 16, "max_seq_len": 512}
    requests = greedy_requests()
    other = {"dtype": "auto", "cpu_isa": level}
    both = {**sizes, **(other if rounds(level) else {})}  # what a level rounds may change tokens
    expected = alone(folder, requests, **both)
    with pair_of(folder, {**SMALL, **both}, {**SMALL, **sizes, **other}) as pair:
        assert type(pair.decode.runner) is NativeRunner
        deltas = pair.serve(requests)
        assert pair.decode.stats().kv_transfer_failure_total == 0
    assert {name: tokens(said) for name, said in deltas.items()} == {
        name: tokens(said) for name, said in expected.items()
    }


@pytest.fixture(
    scope="module",
    params=[
        {"temperature": 1.0, "top_p": 0.9, "seed": 7},
        {
            "temperature": 0.8,
            "top_k": 20,
            "seed": 3,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.3,
        },
        {"logprobs": 3, "prompt_logprobs": 1},
        {
            "logprobs": 0,
            "temperature": 1.0,
            "seed": 1,
            "min_tokens": 10,
            "ignore_eos": False,
            "logit_bias": {2: 5.0},
        },
        {"frequency_penalty": 1.9, "bad_words": ((5,), (7, 8))},
        {"max_tokens": 1},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"max_tokens": 2, "logprobs": 1},
        {"stop_token_ids": tuple(range(3, 200))},
    ],
    ids=lambda sampling: ",".join(sampling),
)
def sampled(request: pytest.FixtureRequest, tiny_model: Path) -> tuple[list[GenerateRequest], dict[str, Any]]:
    """Requests of a sampling, and what one core says to them."""
    requests = [request_of(str(index), prompt, **request.param) for index, prompt in enumerate(PROMPTS[:10])]
    return requests, {name: spoken(said) for name, said in alone(tiny_model, requests).items()}


def test_sampling_goes_on_as_if_it_had_begun_here(
    tiny_model: Path, sampled: tuple[list[GenerateRequest], dict[str, Any]], overlap: str, early: bool
) -> None:
    requests, expected = sampled
    with pair_of(tiny_model, {**SMALL, "overlap_scheduler": overlap}) as pair:
        deltas = pair.serve(requests, early=early)
    assert {name: spoken(said) for name, said in deltas.items()} == expected


def test_the_first_token_alone_is_held_and_nothing_runs_meanwhile(tiny_model: Path) -> None:
    with pair_of(tiny_model, {**SMALL, "overlap_scheduler": "on"}) as pair:
        handed = pair.hand_over(request_of("a", PROMPTS[0]))
        stats = pair.prefill.stats()
        blocks = -(-len(PROMPTS[0]) // 8)
        assert (stats.num_held_requests, stats.num_held_blocks, stats.kv_cache_stats.used_num_blocks) == (
            1,
            blocks,
            blocks,
        )
        assert (stats.num_active_requests, stats.num_completed_requests) == (0, 0)
        assert not pair.prefill.ready and len(handed.first.token_ids) == 1 and handed.first.prompt is not None
        pair.finish()
        assert pair.prefill.stats().num_completed_requests == 1 and pair.prefill.stats().num_aborted_requests == 0


def transferred(pair: Any) -> int:
    """Blocks that the decode core has read so far."""
    size = pair.decode.layout.block_bytes[0]
    num_bytes = pair.decode.stats().kv_transfer_bytes
    assert num_bytes % size == 0
    return int(num_bytes // size)


def test_only_blocks_that_are_not_here_are_read(tiny_model: Path) -> None:
    prefix = prompt_of(40)
    with pair_of(tiny_model, SMALL) as pair:
        pair.serve([request_of("first", prefix + prompt_of(4))])
        assert transferred(pair) == 6
        pair.serve([request_of("shares", prefix + prompt_of(20))])
        assert transferred(pair) == 6 + 3
        pair.serve([request_of("whole", prefix)])
        assert transferred(pair) == 9 and pair.decode.stats().kv_transfer_success_total == 2, "all of it is here"


def test_equal_prompts_at_once_are_read_once(tiny_model: Path) -> None:
    prompt = prompt_of(45)
    requests = [request_of(str(index), prompt, temperature=1.0, seed=index) for index in range(5)]
    expected = alone(tiny_model, requests)
    with pair_of(tiny_model, SMALL) as pair:
        pair.control()
        for request in requests:
            pair.begin(request)
        step(pair.decode)
        assert len(pair.controlled) == 1 and len(pair.decode.scheduler.waiting) == 4
        pair.controlled[0].succeed()
        step(pair.decode)
        step(pair.decode)
        for controlled in pair.controlled[1:]:
            controlled.succeed()
        assert [len(controlled.reads) for controlled in pair.controlled] == [7, 2, 2, 2, 2], (
            "blocks, and the word of a lease"
        )
        deltas = pair.finish()
    for name, said in deltas.items():
        assert tokens(said) == tokens(expected[name])[-len(tokens(said)) :]


def test_only_blocks_within_the_attention_window_are_read(tmp_path: Path) -> None:
    """24 tokens back from position 100: blocks 9 to 12 of 8 tokens; of the full layers all 13."""
    folder = save("gemma3_text", tmp_path)
    with pair_of(folder, SMALL) as pair:
        full, window = pair.decode.layout.block_bytes
        prompt = prompt_of(100)
        pair.serve([request_of("a", prompt)])
        assert pair.decode.stats().kv_transfer_bytes == 13 * full + 4 * window
        pair.serve([request_of("b", prompt[:96] + prompt_of(4))])
        assert pair.decode.stats().kv_transfer_bytes == 14 * full + 5 * window


def test_blocks_read_from_a_peer_can_be_reused(tiny_model: Path) -> None:
    prompt = prompt_of(45)
    with pair_of(tiny_model, SMALL) as pair:
        pair.serve([request_of("a", prompt, max_tokens=2)])
        stored = [
            block.tokens for event in pair.events if isinstance(event.data, Stored) for block in event.data.blocks
        ]
        assert [[token.token_id for token in block] for block in stored] == [prompt[i : i + 8] for i in range(0, 40, 8)]
        pair.decode.add(sequence_of(pair.decode, request_of("local", prompt)))
        deltas = pair.finish()["local"]
        assert deltas[0].prompt is not None and deltas[0].prompt.cached_tokens == 40


def test_lost_blocks_are_computed_here(tiny_model: Path, expected: dict[str, list[int]]) -> None:
    request = greedy_requests()[3]
    with pair_of(tiny_model, SMALL) as pair:
        handed = replace(pair.hand_over(request), state=b"")
        pair.decode.add(sequence_of(pair.decode, replace(request, handoff=handed)))
        deltas = pair.finish()["3"]
        assert [*handed.first.token_ids, *tokens(deltas)] == expected["3"] and all(
            delta.prompt is None for delta in deltas
        )
        assert pair.decode.stats().kv_transfer_failure_total == 0, "nothing was tried"
