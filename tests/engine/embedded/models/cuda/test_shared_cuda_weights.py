"""The weights of the GPU model in the memory service, without a GPU: on memory of the host."""

from asyncio import to_thread
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # tests.support.cuda needs it

if torch.cuda.is_available():
    pytest.skip("the driver is a stand-in", allow_module_level=True)

from engine.config import EmbeddedConfig
from engine.errors import EngineFailure
from engine.memory.service import MemoryService
from tests.support.cuda import OPTIONS, cuda_runner, interpreter, save  # noqa: F401 - fixtures
from tests.support.cuda_driver import FakeDriver
from tests.support.steps import Part, step_of


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}])
async def test_a_second_engine_takes_the_weights_without_reading_them(
    cuda_runner: ModuleType,  # noqa: F811
    memory_service: MemoryService,
    tmp_path: Path,
    options: dict[str, Any],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save(tmp_path / "model", 0.06, kind=kind)

    def load(**more: str) -> Any:
        return cuda_runner.CudaRunner(EmbeddedConfig(model=str(folder), **OPTIONS, **options, **more))

    def logits(runner: Any) -> torch.Tensor:
        return runner.forward(step_of([Part([5, 9, 33, 7], [0], 0, 4)])).clone()

    expected = logits(load())
    first = await to_thread(load, memory_service=str(memory_service.path))
    assert torch.equal(logits(first), expected)
    monkeypatch.setattr("engine.embedded.models.checkpoint.Checkpoint.fill", None)  # nothing is read again
    second = await to_thread(load, memory_service=str(memory_service.path))
    assert torch.equal(logits(second), expected)
    (owned,) = memory_service.status.owned
    assert (owned.leases, memory_service.status.filled, memory_service.status.granted) == (2, 1, 1)
    assert first.shared_weights.bytes == second.shared_weights.bytes == owned.size


def test_a_standby_engine_takes_the_memory_of_kv_blocks_when_it_starts(
    cuda_runner: ModuleType,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("engine.memory.device.load_driver", lambda: driver)
    folder = save(tmp_path / "model", 0.06)
    own = cuda_runner.CudaRunner(EmbeddedConfig(model=str(folder), **OPTIONS))
    standby = cuda_runner.CudaRunner(EmbeddedConfig(model=str(folder), kv_memory_later=True, **OPTIONS))
    address, graphs = standby.cache.data.data_ptr(), standby.graph_sizes
    assert graphs == own.graph_sizes and graphs
    standby.take_memory()
    assert standby.cache.data.data_ptr() == address and not standby.cache.data.any()
    for part in (Part([5, 9, 33, 7, 21], [3, 0], 0, 5), Part([5, 9, 33, 7, 21, 8], [3, 0], 5, 1)):
        assert torch.equal(standby.forward(step_of([part])), own.forward(step_of([part])))
    driver.memory = 0
    with pytest.raises(EngineFailure, match="no addresses can be reserved"):
        cuda_runner.CudaRunner(EmbeddedConfig(model=str(folder), kv_memory_later=True, **OPTIONS))
