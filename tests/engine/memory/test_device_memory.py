"""Device memory that the service owns and engines map, on a stand-in for the CUDA driver."""

import ctypes
import gc
from asyncio import to_thread
from pathlib import Path

import pytest

from engine.memory.client import DevicePages, acquire
from engine.memory.device import Driver, ReservedDeviceMemory
from engine.memory.service import MemoryService
from engine.memory.wire import MemoryServiceError
from tests.support.cuda_driver import GRANULARITY, FakeDriver
from tests.support.waiting import until

SIZE = 2 * GRANULARITY


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(4 * GRANULARITY)
    monkeypatch.setattr("engine.memory.device.load_driver", lambda: driver)
    return driver


def pages(service: MemoryService, layout: str = "layers") -> DevicePages:
    driver = Driver()
    lease = acquire(service.path, SIZE, layout, b"files", lambda: b"weights", driver.uuid(0))
    return DevicePages(lease, driver, 0, SIZE)


async def test_engines_of_a_device_map_one_copy_that_the_service_frees(driver: FakeDriver, tmp_path: Path) -> None:
    service = MemoryService(tmp_path / "memory.sock", grace=0.0)
    service.start()
    first = await to_thread(pages, service)
    ctypes.memmove(first.address, b"layers", 6)
    await to_thread(first.done)
    second = await to_thread(pages, service)
    assert second.filled and ctypes.string_at(second.address, 6) == b"layers"
    assert service.status.owned[0].device.startswith("GPU-0001") and driver.created == SIZE
    assert len(driver.handles) == 1, "the service's; mappings keep memory without handles"
    other = await to_thread(pages, service, "other")
    with pytest.raises(MemoryServiceError, match="no room for"):
        await to_thread(pages, service, "more than the device has")
    for each in (first, second, other):
        each.close()
    await until(lambda: not service.status.owned)
    assert not driver.handles
    del first, second, other, each
    gc.collect()
    assert not driver.mappings
    service.close()


async def test_a_device_that_the_service_does_not_see_is_refused(driver: FakeDriver, tmp_path: Path) -> None:
    service = MemoryService(tmp_path / "memory.sock")
    service.start()
    with pytest.raises(MemoryServiceError, match="GPU-ff is not visible here"):
        await to_thread(acquire, service.path, SIZE, "", b"files", lambda: b"weights", "GPU-ff")
    service.close()


def test_reserved_addresses_take_little_memory_until_they_are_used(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.memory.device._STAND_IN_BYTES", GRANULARITY)
    reserved = ReservedDeviceMemory(3 * GRANULARITY - 5, 0)
    address = reserved.address
    ctypes.memset(address + 2 * GRANULARITY, 7, 1)
    assert ctypes.string_at(address, 1) == b"\7", "one piece is behind all addresses"
    assert len(driver.mappings) == 3
    reserved.take()
    assert reserved.address == address and list(driver.mappings.values()) == [3 * GRANULARITY]
    ctypes.memset(address + 2 * GRANULARITY, 7, 1)
    assert ctypes.string_at(address, 1) == b"\0"
    full = ReservedDeviceMemory(8 * GRANULARITY, 0)
    with pytest.raises(MemoryServiceError, match="cuMemCreate failed with CUDA's error 2"):
        full.take()
    del reserved, full
    gc.collect()
    assert not driver.mappings and not driver.handles
