"""Leases of the memory service: shared, sealed, taken over from engines that die, refused and freed."""

import asyncio
import ctypes
import errno
import mmap
import os
import socket
from asyncio import to_thread
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from engine.memory import wire
from engine.memory.client import HostPages, MemoryLease, acquire, status
from engine.memory.service import MemoryService
from engine.memory.wire import MemoryServiceError
from engine.transfer.shared_memory import MemfdMapping
from tests.support.waiting import slowness, until

SIZE = 3 << 12
MEMORY_GRACE_SECONDS = 60.0


def lease(service: MemoryService, layout: str = "panels", size: int = SIZE, weights: bytes = b"weights") -> MemoryLease:
    return acquire(service.path, size, layout, b"files of " + weights, lambda: weights)


def pages(service: MemoryService) -> HostPages:
    return HostPages(lease(service), SIZE)


def fill(service: MemoryService, text: bytes = b"panels") -> HostPages:
    """Lease and fill memory, as the first engine does."""
    filling = pages(service)
    assert not filling.filled
    ctypes.memmove(filling.address, text, len(text))
    filling.done()
    return filling


def contents(of: HostPages) -> bytes:
    return ctypes.string_at(of.address, 6)


def waiting(service: MemoryService) -> int:
    return sum(owned.waiting for owned in service.status.owned)


async def test_the_first_engine_fills_and_the_others_map_the_same_pages(memory_service: MemoryService) -> None:
    first = await to_thread(fill, memory_service)
    second = await to_thread(pages, memory_service)
    assert second.filled and second.address != first.address
    assert contents(first) == contents(second) == b"panels"
    found = await to_thread(status, memory_service.path)
    assert [(owned.size, owned.leases, owned.ready) for owned in found.owned] == [(SIZE, 2, True)]
    assert (found.filled, found.granted, found.refused) == (1, 1, 0)


async def test_shared_memory_cannot_be_written_to(memory_service: MemoryService) -> None:
    await to_thread(fill, memory_service)
    granted = await to_thread(lease, memory_service)
    with pytest.raises(OSError):
        MemfdMapping(granted.fd, SIZE, mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.pwrite(granted.fd, b"x", 0)
    again = os.open(f"/proc/self/fd/{granted.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)


async def test_memory_that_its_engine_can_still_write_to_is_not_shared(memory_service: MemoryService) -> None:
    def commit_while_mapped() -> None:
        filling = lease(memory_service)
        writable = MemfdMapping(filling.fd, SIZE, mmap.PROT_WRITE)
        with pytest.raises(MemoryServiceError, match="still mapped for writing"):
            filling.commit()
        del writable

    await to_thread(commit_while_mapped)


async def test_other_weights_layouts_and_devices_have_memory_of_their_own(memory_service: MemoryService) -> None:
    await to_thread(fill, memory_service)
    others = [await to_thread(lease, memory_service, "blocks"), await to_thread(lease, memory_service, weights=b"x")]
    assert not any(other.filled for other in others)
    assert len(memory_service.status.owned) == 3


async def test_equal_weights_in_other_files_are_shared_and_known_files_are_not_hashed_again(
    memory_service: MemoryService,
) -> None:
    hashed: list[bytes] = []

    def ask(files: bytes) -> MemoryLease:
        def digest() -> bytes:
            hashed.append(files)
            return b"weights"

        return acquire(memory_service.path, SIZE, "panels", files, digest)

    first = await to_thread(lambda: HostPages(ask(b"here"), SIZE))
    await to_thread(first.done)
    assert (await to_thread(ask, b"copied")).filled
    assert (await to_thread(ask, b"here")).filled
    assert hashed == [b"here", b"copied"]


async def test_an_engine_that_asks_meanwhile_waits_until_the_memory_is_filled(memory_service: MemoryService) -> None:
    first = await to_thread(pages, memory_service)
    second = asyncio.create_task(to_thread(lease, memory_service))
    await until(lambda: waiting(memory_service) == 1)
    await to_thread(first.done)
    assert (await second).filled


async def test_when_the_filling_engine_dies_the_next_one_fills(memory_service: MemoryService) -> None:
    first = await to_thread(lease, memory_service)
    others = [asyncio.create_task(to_thread(lease, memory_service)) for _ in range(2)]
    await until(lambda: waiting(memory_service) == 2)
    first.close()
    done, pending = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
    second = done.pop().result()
    assert not second.filled and len(pending) == 1
    await to_thread(lambda: HostPages(second, SIZE).done())
    assert (await pending.pop()).filled


async def test_an_engine_for_which_no_descriptor_is_left_gets_an_answer_and_so_do_others(
    memory_service: MemoryService, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await to_thread(pages, memory_service)
    others = [asyncio.create_task(to_thread(lease, memory_service)) for _ in range(2)]
    await until(lambda: waiting(memory_service) == 2)
    reopened: list[int] = []

    def reopen(fd: int) -> int:
        reopened.append(fd)
        if len(reopened) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return os.dup(fd)

    monkeypatch.setattr("engine.memory.service.reopen", reopen)
    await to_thread(first.done)
    ends = await asyncio.gather(*others, return_exceptions=True)
    assert sorted(isinstance(end, MemoryLease) for end in ends) == [False, True]
    assert any("Too many open files" in str(end) for end in ends)
    assert memory_service.status.owned[0].leases == 2 and memory_service.status.refused == 1


async def test_a_lease_ends_with_its_connection_and_unused_memory_is_freed_after_a_while(tmp_path: Path) -> None:
    service = MemoryService(tmp_path / "memory.sock", grace=0.05)
    service.start()
    leased = await to_thread(fill, service)
    assert service.status.owned[0].leases == 1
    leased.close()
    await until(lambda: not service.status.owned)
    assert service.status.freed == 1 and contents(leased) == b"panels", "what is mapped stays"
    service.close()


async def test_a_new_lease_in_time_keeps_the_memory(tmp_path: Path) -> None:
    grace = 0.2 * slowness()
    service = MemoryService(tmp_path / "memory.sock", grace=grace)
    service.start()
    (await to_thread(fill, service)).close()
    await until(lambda: not service.status.owned[0].leases)
    again = await to_thread(lease, service)
    assert again.filled
    await asyncio.sleep(1.2 * grace)
    assert service.status.owned[0].leases == 1
    service.close()


async def test_at_the_limit_unused_memory_makes_room_and_leased_memory_does_not(tmp_path: Path) -> None:
    service = MemoryService(tmp_path / "memory.sock", limit=2 * SIZE)
    service.start()
    unused = await to_thread(fill, service, b"unused")
    used = await to_thread(lease, service, "used")
    unused.close()
    await until(lambda: not service.status.owned[0].leases)
    other = await to_thread(lease, service, "other")
    assert len(service.status.owned) == 2 and service.status.freed == 1
    with pytest.raises(MemoryServiceError, match="no room"):
        await to_thread(lease, service, "one more")
    with pytest.raises(MemoryServiceError, match="no room"):
        await to_thread(lease, service, "enormous", 1 << 60)
    other.close()
    await until(lambda: len(service.status.owned) == 1)
    (await to_thread(fill, service)).close()
    await until(lambda: not all(owned.leases for owned in service.status.owned))
    with pytest.raises(MemoryServiceError, match="no room"):
        await to_thread(lease, service, "too large", 2 * SIZE)
    assert len(service.status.owned) == 2, "what would make no room stays"
    del used
    service.close()


async def test_requests_that_cannot_be_served_are_refused_with_the_reason(memory_service: MemoryService) -> None:
    await to_thread(fill, memory_service)
    with pytest.raises(MemoryServiceError, match=f"has {SIZE} bytes, not {2 * SIZE}"):
        await to_thread(lease, memory_service, "panels", 2 * SIZE)

    def refusal(message: bytes) -> str:
        with wire.unix_socket() as connection:
            connection.connect(str(memory_service.path))
            connection.send(message)
            answer, _ = wire.receive_answer(connection)
            assert isinstance(answer, wire.Refused)
            return answer.reason

    newer = msgspec.msgpack.encode(wire.Acquire(wire.VERSION + 1, SIZE, "", "panels", b"files", b"weights"))
    assert "version" in await to_thread(refusal, newer)
    assert "cannot be read" in await to_thread(refusal, b"\xc1")
    early = msgspec.msgpack.encode(wire.Commit())
    assert "fills no memory" in await to_thread(refusal, early)
    with pytest.raises(MemoryServiceError, match="CUDA's driver cannot be used"):
        await to_thread(acquire, memory_service.path, SIZE, "panels", b"files", lambda: b"weights", "GPU-00")
    assert memory_service.status.refused == 5


async def test_a_service_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.memory.client._ANSWER_SECONDS", 0.05)
    with pytest.raises(MemoryServiceError, match="none answers"):
        await to_thread(acquire, tmp_path / "none", SIZE, "", b"", lambda: b"")
    with wire.unix_socket() as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen(1)
        with pytest.raises(MemoryServiceError, match="connection to it failed"):
            await to_thread(acquire, tmp_path / "silent", SIZE, "", b"", lambda: b"")


async def test_a_service_without_descriptors_waits_and_goes_on(
    memory_service: MemoryService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.memory.service._ACCEPT_PAUSE", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", _no_descriptor)
        asked = asyncio.create_task(to_thread(status, memory_service.path))
        await until(lambda: "no descriptor" in caplog.text)
        for _ in range(50):
            await asyncio.sleep(0)
        assert caplog.text.count("no descriptor") == 1
    assert (await asked).granted == 0


def _no_descriptor(_: socket.socket) -> NoReturn:
    raise OSError(errno.EMFILE, "no descriptor")


async def test_a_second_service_does_not_start_and_a_killed_ones_socket_is_replaced(
    memory_service: MemoryService,
) -> None:
    with pytest.raises(OSError, match="already answers"):
        MemoryService(memory_service.path).start()
    dead = memory_service.path.with_name("dead.sock")
    with wire.unix_socket() as killed:
        killed.bind(str(dead))
    second = MemoryService(dead)
    second.start()
    assert dead.stat().st_mode & 0o077 == 0
    second.close()
    assert not dead.exists()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("weights")
    with pytest.raises(OSError, match="not a socket"):
        MemoryService(path).start()
    assert path.read_text() == "weights"
