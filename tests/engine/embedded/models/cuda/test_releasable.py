"""Device memory that a sleep releases while addresses stay, without a GPU: memory of the host takes its place."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # tests.support.cuda needs it

if torch.cuda.is_available():
    pytest.skip("the driver is a stand-in", allow_module_level=True)

from engine.config import EmbeddedConfig, SleepConfig
from engine.embedded.models.cuda import compressed, releasable
from engine.embedded.models.cuda.decoder import LlamaDecoder
from engine.embedded.models.cuda.releasable import ReleasableWeights
from engine.errors import EngineFailure
from engine.memory.device import ReservedDeviceMemory
from engine.sleep import TAGS
from tests.support.cuda import OPTIONS, cuda_runner, interpreter, save  # noqa: F401 - fixtures
from tests.support.cuda_driver import FakeDriver
from tests.support.steps import Part, step_of

CPU = torch.device("cpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr("engine.memory.device.load_driver", lambda: driver)
    monkeypatch.setattr(releasable, "_SMALL", 1 << 10)
    return driver


def used(driver: FakeDriver) -> int:
    assert not driver.handles, "the mappings alone keep the memory"
    return sum(driver.mappings.values())


def test_contents_are_kept_or_not_and_addresses_stay(driver: FakeDriver) -> None:
    weights = ReleasableWeights(CPU)
    small, large, half = torch.arange(10), torch.arange(30_000.0), torch.ones((2, 5000), dtype=torch.bfloat16)
    assert weights.place(small) is small
    placed, other = weights.place(large), weights.place(half)
    assert torch.equal(placed, large) and torch.equal(other, half)
    size, address = used(driver), placed.data_ptr()
    assert size
    weights.release(keep=True)
    weights.release(keep=True)
    assert used(driver) == 0
    assert weights.resume() and weights.resume()
    assert (used(driver), placed.data_ptr()) == (size, address)
    assert torch.equal(placed, large) and torch.equal(other, half)
    weights.release(keep=False)
    assert not weights.resume() and used(driver) == size
    weights.release(keep=True)
    weights.release(keep=False)  # deeper: the copy is dropped
    assert not weights.resume()


def test_without_room_it_stays_released_and_may_be_tried_again(driver: FakeDriver) -> None:
    weights = ReleasableWeights(CPU)
    large = weights.place(torch.arange(30_000.0))
    weights.place(torch.arange(50_000.0))
    weights.release(keep=True)
    room, driver.memory = driver.memory, 1 << 17
    with pytest.raises(EngineFailure, match="cannot be had again"):
        weights.resume()
    assert used(driver) == 0
    with pytest.raises(EngineFailure, match="cannot be had"):
        weights.place(torch.arange(90_000.0))
    driver.memory = room
    assert weights.resume() and torch.equal(large, torch.arange(30_000.0))


def test_memory_that_is_reserved_can_be_released_and_taken(driver: FakeDriver) -> None:
    memory = ReservedDeviceMemory(100_000, 0)
    memory.take()
    assert not memory.released and used(driver)
    memory.release()
    assert memory.released and not used(driver)
    memory.take()
    assert not memory.released and used(driver)


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"load_format": "dummy"}])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_runner_computes_the_same_after_both_levels(
    cuda_runner: ModuleType,  # noqa: F811
    driver: FakeDriver,
    tmp_path: Path,
    tied: bool,
    kind: str,
    options: dict[str, Any],
) -> None:
    """Weights are kept, then read again; the KV cache comes back empty at its address."""
    folder = save(tmp_path / "model", 0.06, tied=tied, kind=kind)
    config = EmbeddedConfig(model=str(folder), sleep=SleepConfig(), kv_memory_later=True, **OPTIONS, **options)
    runner: Any = cuda_runner.CudaRunner(config)
    runner.take_memory()
    step = step_of([Part([5, 9, 33, 7], [0], 0, 4)])
    expected = runner.forward(step).clone()
    size, address = used(driver), runner.cache.data.data_ptr()
    for level in (1, 2):
        runner.release_memory(TAGS, level)
        assert used(driver) == 0
        runner.resume_memory(TAGS)
        assert used(driver) == size and runner.cache.data.data_ptr() == address and not runner.cache.data.any()
        assert torch.equal(runner.forward(step), expected), level


def _without_memory(_: LlamaDecoder) -> None:
    raise torch.OutOfMemoryError("imagined")


@pytest.mark.timeout(600)  # the interpreter compresses each row three times
def test_compressed_copies_are_given_back_and_made_again(
    cuda_runner: ModuleType,  # noqa: F811
    driver: FakeDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compressed, "_LEAST_WIDTH", 32)
    monkeypatch.setattr(compressed, "_WINDOWS", 1)  # the interpreter takes its time for each
    options = OPTIONS | {"dtype": "bfloat16", "compressed_weights": "on", "enable_cuda_graphs": False}
    model, compress, decoders = str(save(tmp_path / "model", 0.06)), LlamaDecoder.compress, []
    monkeypatch.setattr(LlamaDecoder, "compress", lambda decoder: decoders.append(decoder) or compress(decoder))
    again = LlamaDecoder.compress_again
    runner: Any = cuda_runner.CudaRunner(EmbeddedConfig(model=model, sleep=SleepConfig(), **options))
    copies: list[torch.Tensor] = []
    decoders[0].move_copies(lambda part: copies.append(part) or part)
    expected, size = [part.clone() for part in copies], used(driver)
    assert sum(bool(part.any()) for part in copies) >= 2 * (4 * 2 + 1)  # words and scales of two layers and the output
    for level in (1, 2):
        runner.release_memory(TAGS, level)
        assert used(driver) == 0
        with torch.inference_mode():
            copies[1].zero_()  # a small tensor stays, and is made again, too
        monkeypatch.setattr(LlamaDecoder, "compress_again", _without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            runner.resume_memory(TAGS)
        monkeypatch.setattr(LlamaDecoder, "compress_again", again)
        runner.resume_memory(TAGS)
        assert used(driver) == size
        assert all(map(torch.equal, copies, expected)), level


def test_weights_that_cannot_be_read_again_are_read_the_next_time(
    cuda_runner: ModuleType,  # noqa: F811
    driver: FakeDriver,
    tmp_path: Path,
) -> None:
    folder = save(tmp_path / "model", 0.06)
    runner: Any = cuda_runner.CudaRunner(EmbeddedConfig(model=str(folder), sleep=SleepConfig(), **OPTIONS))
    step = step_of([Part([5, 9, 33, 7], [0], 0, 4)])
    expected = runner.forward(step).clone()
    runner.release_memory(TAGS, 2)
    file = folder / "model.safetensors"
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(EngineFailure, match=r"has no model\.safetensors"):
        runner.resume_memory(TAGS)
    (tmp_path / "elsewhere").rename(file)
    runner.resume_memory(TAGS)
    assert torch.equal(runner.forward(step), expected)
