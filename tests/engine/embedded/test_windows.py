"""Models with sliding windows against transformers' own `generate`.

In float32 and greedy, both give the same tokens, however the work is cut up.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.kv.layout import Attends, share
from engine.embedded.models.native.runner import NativeRunner
from engine.embedded.models.torch.runner import TorchRunner
from engine.errors import EngineFailure
from engine.kv_events import Created, KvEvent, Stored
from tests.engine.embedded.test_equivalence import add, make_core, run, tokens
from tests.support.loaded_models import loaded_once
from tests.support.window_models import KINDS, OUTPUT, WINDOW, generate, prompts, save

PROMPTS = prompts()
Case = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module", autouse=True)
def few_models() -> Iterator[None]:
    with loaded_once():
        yield


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """A model folder and what `generate` makes of PROMPTS, of a kind, made once."""

    @functools.cache
    def make(kind: str) -> Case:
        folder = save(kind, tmp_path_factory.mktemp(kind))
        return folder, generate(folder, PROMPTS)

    return make


@pytest.fixture(params=sorted(KINDS))
def case(request: pytest.FixtureRequest, case_of: Callable[[str], Case]) -> Case:
    return case_of(request.param)


@pytest.fixture
def gemma(case_of: Callable[[str], Case]) -> Case:
    return case_of("gemma3_text")


@pytest.fixture(params=["gemma2", "gemma3_text"])
def mixed(request: pytest.FixtureRequest, case_of: Callable[[str], Case]) -> Case:
    """One with windows and full attention, by transformers and by compiled code."""
    return case_of(request.param)


def outputs(core: EngineCore, name: str = "", count: int = len(PROMPTS)) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS[:count]):
        add(core, f"{name}{index}", prompt, max_tokens=OUTPUT)
    deltas = run(core)
    return [tokens(deltas[f"{name}{index}"]) for index in range(count)]


def test_compiled_code_and_transformers_are_both_tried(case_of: Callable[[str], Case]) -> None:
    runners = {kind: type(make_core(case_of(kind)[0]).runner) for kind in KINDS}
    expected = {kind: NativeRunner if kind in ("gemma3_text", "mistral") else TorchRunner for kind in KINDS}
    assert runners == expected


def test_the_window_matters(case: Case) -> None:
    """Or equality would say little: with a window as long as the context most outputs differ."""
    folder, expected = case
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, sliding_window=512)
    ids = torch.tensor([PROMPTS[0]])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
    )
    assert len(PROMPTS[0]) > WINDOW and whole[0, len(PROMPTS[0]) :].tolist() != expected[0]


@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_equals_generate_at_every_batch_size(case: Case, batch: int) -> None:
    folder, expected = case
    count = 5 if batch == 1 else len(PROMPTS)
    assert outputs(make_core(folder, max_batch_size=batch, kv_block_size=8), count=count) == expected[:count]


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        pytest.param({"max_num_tokens": 37, "kv_block_size": 5, "overlap_scheduler": "off"}, False, id="odd sizes"),
        pytest.param(
            {"num_blocks": 75, "kv_block_size": 4, "max_num_tokens": 60, "overlap_scheduler": "on"},
            True,
            id="preempted",
        ),
        pytest.param(
            {
                "num_blocks": 75,
                "kv_block_size": 4,
                "enable_chunked_prefill": False,
                "enable_block_reuse": False,
                "overlap_scheduler": "on",
            },
            True,
            id="preempted, no reuse, unchunked",
        ),
    ],
)
def test_greedy_equals_generate_however_it_is_scheduled(mixed: Case, options: dict[str, Any], preempts: bool) -> None:
    folder, expected = mixed
    core = make_core(folder, **options)
    assert outputs(core) == expected
    assert (core.scheduler.preemptions > 0) == preempts
    assert core.stats().kv_cache_stats.used_num_blocks == 0


def test_a_second_run_takes_up_prefixes_and_gives_the_same(case: Case) -> None:
    folder, expected = case
    core = make_core(folder, kv_block_size=8, num_blocks=512)
    assert outputs(core, "first") == expected
    before = core.stats().kv_cache_stats
    assert outputs(core, "again") == expected
    after = core.stats().kv_cache_stats
    assert after.reused_blocks - before.reused_blocks == sum((len(prompt) - 1) // 8 for prompt in PROMPTS)
    assert after.max_num_blocks == sum(group.num_blocks for group in core.runner.groups)


def test_a_model_of_windows_alone_is_bounded_by_none(tmp_path: Path) -> None:
    """80 tokens fit into the pool, the longest prompt has 270."""
    folder = save("mistral", tmp_path)
    core = make_core(folder, kv_block_size=8, num_blocks=10, max_batch_size=4)
    assert outputs(core) == generate(folder, PROMPTS)
    assert core.blocks.capacity > 1 << 60


def test_events_tell_each_groups_window(gemma: Case) -> None:
    events: list[KvEvent] = []
    config = EmbeddedConfig(model=str(gemma[0]), dtype="float32", kv_block_size=8, num_blocks=64)
    core = EngineCore(config, events.append)
    created = [(event.window_size, event.data) for event in events]
    assert created == [(512, Created((64, 0))), (WINDOW, Created((64, 0)))]
    add(core, "a", PROMPTS[0], max_tokens=1)
    run(core)
    assert [event.event_id for event in events] == list(range(len(events)))
    stored: dict[int, list[int]] = {512: [], WINDOW: []}
    for event in events[2:]:
        assert isinstance(event.data, Stored)
        stored[event.window_size] += [block.block_hash for block in event.data.blocks]
    assert stored[512] == stored[WINDOW] and len(stored[WINDOW]) == len(PROMPTS[0]) // 8


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    core = make_core(save("gemma3_text", tmp_path, sliding_window=512), num_blocks=20)
    assert [(group.window, len(group.layers)) for group in core.runner.groups] == [(None, 3)]


def test_memory_of_a_long_sequence_drops(tmp_path: Path) -> None:
    """4,096 tokens, a window of 512, layers as in Gemma 3: five of six keep a window."""
    layers = {"num_hidden_layers": 6, "layer_types": None}
    folder = save("gemma3_text", tmp_path, **layers, max_position_embeddings=8192, sliding_window=512)
    core = make_core(folder, num_blocks=160, max_num_tokens=512, overlap_scheduler="off")
    add(core, "long", [3 + index % 380 for index in range(4096)], max_tokens=2)
    while not core.scheduler.running or core.scheduler.running[0].remaining > 1:
        core.step()
    used = [pool.used for pool in core.blocks.pools]
    kept = sum(count * len(group.layers) for count, group in zip(used, core.runner.groups, strict=True))
    assert used[0] == 4096 // 32 and used[1] <= 512 // 32 + 1
    assert kept / (used[0] * 6) < 0.28


ATTENDS = Attends((64, 64, 64, None), kv_heads=1, head_dim=8)


def test_memory_is_shared_so_that_long_sequences_fit_equally_often() -> None:
    full, window = share(ATTENDS, 1000, 10_000_000, 32, 0)
    assert (full.window, full.layers, window.window, window.layers) == (None, (3,), 64, (0, 1, 2))
    assert 9_950_000 < full.num_blocks * 1000 + window.num_blocks * 3000 <= 10_000_000
    assert full.num_blocks * 32 // 4096 == window.num_blocks * 32 // 64


@pytest.mark.parametrize(
    ("memory", "blocks", "said"),
    [(5000, 0, "no room for a KV block"), (0, 4, "4 KV blocks of 32 tokens are too few for a sliding window of 64")],
)
def test_too_little_memory_stops_the_start(memory: int, blocks: int, said: str) -> None:
    with pytest.raises(EngineFailure, match=said):
        share(ATTENDS, 1000, memory, 32, blocks)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
        (
            "llama4_text",
            {"num_local_experts": 2, "attention_chunk_size": 64, "intermediate_size_mlp": 96},
            "chunked_attention",
        ),
        ("qwen3_next", {"num_experts": 2, "num_experts_per_tok": 1}, "linear_attention"),
        (
            "gemma4_text",
            {"global_head_dim": 32, "vocab_size_per_layer_input": 384, "hidden_size_per_layer_input": 0},
            "of one shape",
        ),
    ],
)
def test_other_layers_are_refused_by_name(tmp_path: Path, kind: str, options: dict[str, Any], said: str) -> None:
    folder = save(kind, tmp_path, num_hidden_layers=4, **options)
    with pytest.raises(EngineFailure, match=said):
        make_core(folder)
