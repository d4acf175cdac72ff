"""Sliding windows on the compiled path: what lies behind a window is not read, wherever it ends within a block."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.embedded.kv.groups import GONE
from engine.embedded.models.native.runner import NativeRunner
from tests.engine.embedded.models.native.test_native import KINDS, load, make_folder, tokens_of
from tests.support.steps import Part, step_of

WINDOW, LENGTH = 24, 170
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": KINDS["gemma3_text"],
}


@pytest.fixture(scope="module", params=WINDOWED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp(request.param), request.param, **WINDOWED[request.param])


def logits_of(model: NativeRunner, size: int, steps: list[tuple[int, int]], give_up: bool) -> list[torch.Tensor]:
    """Compute a sequence in steps, each as start and length. Blocks behind the windows are given up and overwritten, or
    kept."""
    tokens, blocks, found = tokens_of(LENGTH, 1), list(range(-(-LENGTH // size))), []
    for start, length in steps:
        tables = []
        for group, cache in zip(model.groups, model.memory.blocks, strict=True):
            gone = 0 if group.window is None or not give_up else max(0, start - group.window + 1) // size
            cache[:gone].fill_(torch.nan)
            tables.append([GONE] * gone + blocks[gone:])
        step = step_of([Part(tokens, blocks, start, length)])
        found.append(model.forward(replace(step, tables=[tables])).clone())
    return found


@pytest.mark.parametrize("size", [6, 16, 32, 64])
def test_blocks_behind_a_window_are_not_read(folder: Path, size: int, level: str) -> None:
    steps = [(0, 40), (40, 1), (41, 30), (71, 1), (72, 1), (73, 90), (163, 7)]
    kept, given_up = (load(folder, kv_block_size=size, cpu_isa=level) for _ in range(2))
    assert {group.window for group in kept.groups} >= {WINDOW}
    whole, part = logits_of(kept, size, steps, give_up=False), logits_of(given_up, size, steps, give_up=True)
    for expected, found in zip(whole, part, strict=True):
        assert found.isfinite().all() and torch.equal(found, expected)


def test_each_window_takes_blocks_of_its_own_pool(folder: Path) -> None:
    model = load(folder, num_blocks=0, kv_cache_memory_mb=64)
    layer_bytes = 2 * 32 * 32 * 4 * model.memory.attends.kv_heads
    for group, blocks in zip(model.groups, model.memory.blocks, strict=True):
        assert blocks.nbytes == group.num_blocks * len(group.layers) * layer_bytes
    assert sorted(layer for group in model.groups for layer in group.layers) == [0, 1, 2]
