"""Shared memory of a real GPU: one copy for several engines, read-only, and a standby engine's KV blocks."""

import gc
from asyncio import to_thread
from pathlib import Path
from typing import Any

import pytest

from engine.memory.client import DevicePages, acquire
from engine.memory.device import Driver, ReservedDeviceMemory
from engine.memory.service import MemoryService

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIB = 1 << 20


MEMORY_GRACE_SECONDS = 0.0


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def settled() -> int:
    """Return the bytes in use after torch has freed its cache. Capturing a graph frees it, too."""
    gc.collect()
    torch.cuda.empty_cache()
    return used()


async def test_two_mappings_are_one_copy_and_cannot_be_written_to(memory_service: MemoryService) -> None:
    from engine.embedded.models.shared_weights import bytes_at  # noqa: PLC0415 - loads torch's CUDA

    torch.zeros(1, device="cuda")
    driver, size = Driver(), 512 * MIB
    before = settled()

    def pages() -> DevicePages:
        torch.zeros(1, device="cuda")  # makes the device's context this thread's own
        lease = acquire(memory_service.path, size, "layers", b"files", lambda: b"weights", driver.uuid(0))
        return DevicePages(lease, driver, 0, size)

    first = await to_thread(pages)
    values = bytes_at(first.address, size, torch.device("cuda"))
    values.fill_(7)
    torch.cuda.synchronize()
    await to_thread(first.done)
    second = await to_thread(pages)
    assert second.filled and int(bytes_at(second.address, size, torch.device("cuda"))[-1]) == 7
    assert used() - before < 1.1 * size
    del values, first, second


def test_captured_graphs_outlive_the_memory_behind_their_addresses() -> None:
    from engine.embedded.models.shared_weights import bytes_at  # noqa: PLC0415

    size, device = 1024 * MIB, torch.device("cuda")
    torch.zeros(1, device=device)
    before = settled()
    reserved = ReservedDeviceMemory(size, 0)
    memory = bytes_at(reserved.address, size, device)
    assert used() - before < size // 4
    graph = torch.cuda.CUDAGraph()
    memory[-MIB:].add_(1)
    with torch.cuda.graph(graph):
        memory[-MIB:].add_(1)
    torch.cuda.synchronize()
    reserved.take()
    memory.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert int(memory[-1]) == 1 and int(memory[0]) == 0 and used() - before >= size


async def test_a_standby_engine_computes_what_the_one_before_did(memory_service: MemoryService, tmp_path: Path) -> None:
    from engine.config import EmbeddedConfig  # noqa: PLC0415
    from engine.embedded.models.cuda.runner import CudaRunner  # noqa: PLC0415
    from tests.engine.embedded.models.cuda.test_cuda_engine import save  # noqa: PLC0415
    from tests.support.steps import Part, step_of  # noqa: PLC0415

    folder = save(tmp_path / "model", 0.03)

    def load(**options: Any) -> CudaRunner:
        return CudaRunner(EmbeddedConfig(model=str(folder), num_blocks=64, **options))

    step = step_of([Part(list(range(5, 45)), [3, 7], 0, 40)])
    expected = load().forward(step).clone()
    first = await to_thread(load, memory_service=str(memory_service.path))
    standby = await to_thread(load, memory_service=str(memory_service.path), kv_memory_later=True)
    assert standby.shared_weights is not None and standby.shared_weights.bytes and memory_service.status.granted == 1
    standby.take_memory()
    for runner in (first, standby):
        torch.testing.assert_close(runner.forward(step), expected)
