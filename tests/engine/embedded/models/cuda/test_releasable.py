"""Device memory that is released while its addresses stay, without a GPU: the host's memory takes its place."""

import ctypes
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.config import EmbeddedConfig, SleepConfig
from engine.embedded.models.cuda.releasable import ReleasableMemory
from engine.errors import EngineFailure
from engine.memory.wire import MemoryServiceError
from engine.sleep import TAGS
from tests.engine.embedded.models.cuda.test_cuda_model import OPTIONS, save
from tests.support.cuda import cuda_runner, interpreter  # noqa: F401 - fixtures
from tests.support.steps import Part, step_of

PAGE = 4096
CPU = torch.device("cpu")


class StandIn:
    """The driver's calls, on memory of the host that is overwritten once it is unmapped."""

    def __init__(self) -> None:
        self.reserved: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.created: dict[int, int] = {}
        self.handles = 0
        self.room = 1 << 40

    @property
    def used(self) -> int:
        return sum(self.mapped.values())

    def granularity(self, ordinal: int) -> int:
        return PAGE

    def reserve(self, size: int) -> int:
        assert size % PAGE == 0
        buffer = ctypes.create_string_buffer(size)
        self.reserved[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def create(self, ordinal: int, size: int) -> int:
        if self.used + size > self.room:
            raise MemoryServiceError("out of memory")
        self.handles += 1
        self.created[self.handles] = size
        return self.handles

    def map(self, address: int, size: int, handle: int) -> None:
        assert self.created[handle] == size and address not in self.mapped
        self.mapped[address] = size

    def release(self, handle: int) -> None:
        del self.created[handle]

    def allow(self, address: int, size: int, ordinal: int, access: int) -> None:
        assert self.mapped[address] == size

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size
        ctypes.memset(address, 0xFF, size)


@pytest.fixture
def driver() -> StandIn:
    return StandIn()


def memory_of(driver: StandIn) -> ReleasableMemory:
    return ReleasableMemory(CPU, driver)  # type: ignore[arg-type]


def test_contents_are_kept_or_not_and_addresses_stay(driver: StandIn) -> None:
    memory = memory_of(driver)
    small, large = torch.arange(10), torch.arange(3000.0)
    assert memory.place(small) is small
    placed, other = memory.place(large), memory.empty((2, 5000), torch.bfloat16)
    other.fill_(3)
    assert torch.equal(placed, large) and not driver.created
    used, address = driver.used, placed.data_ptr()
    memory.release(keep=True)
    memory.release(keep=True)
    assert driver.used == 0 and not torch.equal(placed, large)
    assert memory.resume() and memory.resume()
    assert (driver.used, placed.data_ptr()) == (used, address)
    assert torch.equal(placed, large) and other.eq(3).all()
    memory.release(keep=False)
    assert not memory.resume() and driver.used == used
    memory.release(keep=True)
    memory.release(keep=False)  # deeper: the copy is dropped
    assert not memory.resume()


def test_without_room_it_stays_released_and_may_be_tried_again(driver: StandIn) -> None:
    memory = memory_of(driver)
    large = memory.place(torch.arange(3000.0))
    memory.place(torch.arange(5000.0))
    used = driver.used
    memory.release(keep=True)
    driver.room = used - 1
    with pytest.raises(EngineFailure, match="cannot be had again: out of memory"):
        memory.resume()
    assert driver.used == 0
    with pytest.raises(EngineFailure, match="cannot be had: out of memory"):
        memory.empty((1 << 20,), torch.float32)
    driver.room = used
    assert memory.resume() and torch.equal(large, torch.arange(3000.0))


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}])
def test_the_runner_computes_the_same_after_both_levels(
    cuda_runner: ModuleType,  # noqa: F811
    driver: StandIn,
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_runner, "ReleasableMemory", lambda _: memory_of(driver))
    folder = save(tmp_path / "model", 0.06)
    config = EmbeddedConfig(model=str(folder), sleep=SleepConfig(), **OPTIONS, **options)
    runner: Any = cuda_runner.CudaRunner(config)
    step = step_of([Part([5, 9, 33, 7], [0], 0, 4)])
    expected = runner.forward(step).clone()
    used = driver.used
    assert used > 0
    for level in (1, 2, 1):
        runner.release_memory(TAGS, level)
        assert driver.used == 0
        runner.resume_memory(TAGS)
        assert driver.used == used
        assert torch.equal(runner.forward(step), expected), level
    runner.release_memory(("weights",), 2)
    with monkeypatch.context() as patch:
        patch.setattr("engine.embedded.models.torch.runner.load_weights", None)
        with pytest.raises(TypeError):
            runner.resume_memory(TAGS)
    runner.resume_memory(TAGS)
    assert torch.equal(runner.forward(step), expected)
