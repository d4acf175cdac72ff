"""Models with sliding windows against transformers' own `generate`, float32, greedy: token for token, however the work is cut up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_embedded_equivalence import add, make_core, run, tokens
from transformers import AutoModelForCausalLM
from window_models import KINDS, OUTPUT, WINDOW, generate, prompts, save

from engine.embedded.core import EngineCore

PROMPTS = prompts()
Case = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model folder and what `generate` makes of PROMPTS."""
    folder = save(request.param, tmp_path_factory.mktemp(request.param))
    return folder, generate(folder, PROMPTS)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = save("gemma3_text", tmp_path_factory.mktemp("gemma"))
    return folder, generate(folder, PROMPTS)


def outputs(core: EngineCore, name: str = "") -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        add(core, f"{name}{index}", prompt, max_tokens=OUTPUT)
    deltas = run(core)
    return [tokens(deltas[f"{name}{index}"]) for index in range(len(PROMPTS))]


def test_the_window_matters(case: Case) -> None:
    """Or equality would say little: with a window as long as the context most outputs differ."""
    folder, expected = case
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, sliding_window=512)
    ids = torch.tensor([PROMPTS[0]])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0)
    assert len(PROMPTS[0]) > WINDOW and whole[0, len(PROMPTS[0]) :].tolist() != expected[0]


@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_equals_generate_at_every_batch_size(case: Case, batch: int) -> None:
    folder, expected = case
    assert outputs(make_core(folder, max_batch_size=batch, kv_block_size=8)) == expected


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        pytest.param({"max_num_tokens": 16}, False, id="chunked"),
        pytest.param({"max_num_tokens": 37, "kv_block_size": 5}, False, id="chunked, odd sizes"),
        pytest.param({"max_num_tokens": 50, "enable_chunked_prefill": False}, False, id="unchunked"),
        pytest.param({"enable_block_reuse": False}, False, id="no reuse"),
        pytest.param({"num_blocks": 75, "kv_block_size": 4, "max_num_tokens": 60}, True, id="preempted"),
        pytest.param({"num_blocks": 75, "kv_block_size": 4, "enable_block_reuse": False}, True, id="preempted, no reuse"),
        pytest.param({"num_blocks": 75, "kv_block_size": 4, "enable_chunked_prefill": False}, True, id="preempted, unchunked"),
    ],
)
def test_greedy_equals_generate_however_it_is_scheduled(gemma: Case, options: dict[str, Any], preempts: bool, overlap: str) -> None:
    folder, expected = gemma
    core = make_core(folder, overlap_scheduler=overlap, **options)
    assert outputs(core) == expected
    assert (core.scheduler.preemptions > 0) == preempts
    assert core.stats().kv_cache_stats.used_num_blocks == 0
