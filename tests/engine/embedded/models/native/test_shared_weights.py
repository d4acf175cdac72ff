"""Engines whose weights are in the memory service: equal logits, one copy, and weights of their own without it."""

import logging
from asyncio import to_thread
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EmbeddedConfig
from engine.embedded.models.load import load_runner
from engine.embedded.models.native.runner import NativeRunner
from engine.errors import EngineFailure
from engine.memory.client import HostPages
from engine.memory.service import MemoryService
from tests.engine.embedded.models.native.test_native import load, make_folder, tokens_of
from tests.support.steps import Part, step_of
from tests.support.waiting import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model", "qwen2", tie_word_embeddings=False)


def logits(runner: NativeRunner) -> torch.Tensor:
    return runner.forward(step_of([Part(tokens_of(40, 1), list(range(3)), 0, 40)]))


async def test_engines_map_one_copy_and_compute_the_same(memory_service: MemoryService, folder: Path) -> None:
    own, socket = load(folder), str(memory_service.path)
    first = await to_thread(load, folder, memory_service=socket)
    second = await to_thread(load, folder, memory_service=socket)
    (owned,) = memory_service.status.owned
    assert (owned.leases, memory_service.status.filled, memory_service.status.granted) == (2, 1, 1)
    for runner in (first, second):
        assert torch.equal(logits(runner), logits(own))
        assert runner.shared_weights.bytes == owned.size and not runner.shared_weights.failure
    assert not own.shared_weights.bytes and not own.shared_weights.failure
    memory_service.close()
    assert torch.equal(logits(second), logits(own)), "what is mapped stays when the memory_service ends"


async def test_each_form_of_the_weights_has_memory_of_its_own(memory_service: MemoryService, folder: Path) -> None:
    kept = [
        await to_thread(load, folder, memory_service=str(memory_service.path), **options)
        for options in ({}, {"quantization": "int8"}, {"cpu_isa": "portable"})
    ]
    assert len(memory_service.status.owned) == 3 and memory_service.status.granted == 0
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kept.append(await to_thread(load, folder, memory_service=str(memory_service.path)))
    assert len(memory_service.status.owned) == 4 and memory_service.status.granted == 0
    assert torch.equal(logits(kept[-1]), logits(load(folder)))


async def test_memory_that_was_not_filled_is_given_up(memory_service: MemoryService, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    right = weights["lm_head.weight"].clone()
    weights["lm_head.weight"][0, 0] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineFailure, match="not finite"):
        await to_thread(load, folder, memory_service=str(memory_service.path))
    await until(lambda: not memory_service.status.owned)
    save_file(weights | {"lm_head.weight": right}, folder / "model.safetensors", {"format": "pt"})
    runner = await to_thread(load, folder, memory_service=str(memory_service.path))
    assert memory_service.status.filled == 1 and runner.shared_weights.bytes


async def test_memory_that_cannot_be_shared_is_left_to_the_next_engine(
    memory_service: MemoryService, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(HostPages, "_protect", lambda _: None)
        first = await to_thread(load, folder, memory_service=str(memory_service.path))
    assert "still mapped for writing" in first.shared_weights.failure
    await until(lambda: not memory_service.status.owned)
    second = await to_thread(load, folder, memory_service=str(memory_service.path))
    assert memory_service.status.filled == 1 and second.shared_weights.bytes
    assert torch.equal(logits(first), logits(second)), "what is mapped stays"


async def test_without_the_service_an_engine_loads_its_own_weights_and_logs_it_once(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    service = MemoryService(tmp_path / "memory.sock", limit=1)
    service.start()
    full = await to_thread(load, folder, memory_service=str(service.path))
    service.close()
    dead = await to_thread(load, folder, memory_service=str(service.path))
    for runner, reason in ((full, "no room"), (dead, "none answers")):
        assert reason in runner.shared_weights.failure and not runner.shared_weights.bytes
        assert torch.equal(logits(runner), logits(load(folder)))
    said = [record for record in caplog.records if "keeps weights of its own" in record.getMessage()]
    assert len(said) == 2


async def test_a_model_that_transformers_computes_has_weights_of_its_own(
    memory_service: MemoryService, folder: Path
) -> None:
    config = EmbeddedConfig(model=str(folder), memory_service=str(memory_service.path), dtype="bfloat16", num_blocks=8)
    runner = await to_thread(load_runner, config)
    assert runner.compute_path == "transformers"
    assert runner.shared_weights is not None and "transformers" in runner.shared_weights.failure
    assert not memory_service.status.owned
