"""Leases of the memory service, as an engine takes them."""

import contextlib
import fcntl
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from weakref import finalize

from engine.memory import wire
from engine.memory.device import Driver, MappedDeviceMemory
from engine.memory.wire import MemoryServiceError
from engine.transfer.shared_memory import SEALED, LargeMapping, reopen

T = TypeVar("T")
log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_FILL_SECONDS = 900.0
"""Time that another engine may take to fill the memory."""
_PAGE = 4096


class MemoryLease:
    """Memory of the service, leased until `close`, as long as this object or at least this process lives.

    If it is not `filled`, this process has to fill it and `commit`.
    """

    def __init__(self, connection: socket.socket, fd: int, filled: bool) -> None:
        self.fd = fd
        self.filled = filled
        self._connection = connection
        self._end = finalize(self, _close, connection, fd)

    def commit(self) -> None:
        """Tell the service that the memory is filled and no longer mapped for writing. Raises MemoryServiceError."""
        with _translated():
            wire.send(self._connection, wire.Commit())
            _expect(self._connection, wire.Granted)
        self.filled = True

    def close(self) -> None:
        """End the lease. What is mapped stays."""
        self._end()


class Pages(ABC):
    """Leased memory at an address: to be filled, then `done`; or filled already and only for reading.

    Raises MemoryServiceError if it cannot be mapped.
    """

    address: int

    def __init__(self, lease: MemoryLease, size: int) -> None:
        self.size = size
        self._lease = lease

    @property
    def filled(self) -> bool:
        return self._lease.filled

    def done(self) -> None:
        """Give up writing, and let others have the memory. It can be read here even if this raises
        MemoryServiceError."""
        self._protect()
        self._lease.commit()

    def close(self) -> None:
        """End the lease. What is mapped stays."""
        self._lease.close()

    @abstractmethod
    def _protect(self) -> None:
        """Map the memory for reading only, at the same address. Raises MemoryServiceError."""


class HostPages(Pages):
    """Memory of the host."""

    def __init__(self, lease: MemoryLease, size: int) -> None:
        super().__init__(lease, size)
        try:
            _check(lease, size)
            self._mapping = LargeMapping(lease.fd, size, writable=not lease.filled)
        except OSError as error:
            raise MemoryServiceError(f"its memory cannot be mapped: {error}") from error
        self.address = self._mapping.address

    def _protect(self) -> None:
        with _translated():
            fd = reopen(self._lease.fd)
            try:
                self._mapping.protect(fd)
            finally:
                os.close(fd)


class DevicePages(Pages):
    """Memory of a CUDA device."""

    def __init__(self, lease: MemoryLease, driver: Driver, ordinal: int, size: int) -> None:
        super().__init__(lease, size)
        self._mapping = MappedDeviceMemory(driver, ordinal, lease.fd, size)
        self.address = self._mapping.address
        if lease.filled:
            self._protect()

    def _protect(self) -> None:
        self._mapping.protect()


def acquire(
    address: Path, size: int, layout: str, files: bytes, digest: Callable[[], bytes], device: str = ""
) -> MemoryLease:
    """Lease memory for weights. `files` tells their files from others by names, sizes and times; `digest` hashes their
    contents, and is called if no engine has told the service.

    Waits while another engine fills the memory. Raises MemoryServiceError.
    """
    connection = _connect(address)
    try:
        with _translated():
            asked = wire.Acquire(wire.VERSION, size, device, layout, files)
            wire.send(connection, asked)
            answer, fds = _receive(connection)
            if isinstance(answer, wire.Unknown):
                wire.send(connection, wire.Acquire(wire.VERSION, size, device, layout, files, digest()))
                answer, fds = _receive(connection)
            if not isinstance(answer, wire.Granted | wire.Fill) or not fds:
                raise MemoryServiceError(f"its answer was {type(answer).__name__}")
            return MemoryLease(connection, fds[0], isinstance(answer, wire.Granted))
    except BaseException:
        connection.close()
        raise


def status(address: Path) -> wire.Status:
    """Return what a service holds. Raises MemoryServiceError."""
    with contextlib.closing(_connect(address)) as connection, _translated():
        wire.send(connection, wire.AskStatus(wire.VERSION))
        return _expect(connection, wire.Status)


def rounded(size: int, granularity: int = _PAGE) -> int:
    """Return a size that memory can have."""
    return -(-size // granularity) * granularity


def _connect(address: Path) -> socket.socket:
    connection = wire.unix_socket()
    try:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(str(address))
    except OSError as error:
        connection.close()
        raise MemoryServiceError(f"none answers at {address}: {error.strerror or error}") from error
    return connection


def _receive(connection: socket.socket) -> tuple[wire.Answer, list[int]]:
    """Return the next answer that is not a refusal, after the time that another engine needs to fill the memory."""
    answer, fds = wire.receive_answer(connection)
    if isinstance(answer, wire.Wait):
        log.info("waiting for another engine that fills the memory of these weights")
        connection.settimeout(_FILL_SECONDS)
        answer, fds = wire.receive_answer(connection)
        connection.settimeout(_ANSWER_SECONDS)
    if isinstance(answer, wire.Refused):
        raise MemoryServiceError(answer.reason)
    return answer, fds


def _expect(connection: socket.socket, kind: type[T]) -> T:
    answer, _ = _receive(connection)
    if not isinstance(answer, kind):
        raise MemoryServiceError(f"its answer was {type(answer).__name__}, not {kind.__name__}")
    return answer


def _close(connection: socket.socket, fd: int) -> None:
    connection.close()
    os.close(fd)


def _check(lease: MemoryLease, size: int) -> None:
    """Check a descriptor. Raises MemoryServiceError unless it has this size, and sealed contents if they are
    complete."""
    sealed = fcntl.fcntl(lease.fd, fcntl.F_GET_SEALS)
    wanted = SEALED | (fcntl.F_SEAL_WRITE if lease.filled else 0)
    if os.fstat(lease.fd).st_size != size or sealed & wanted != wanted:
        raise MemoryServiceError("its memory is not what was asked for")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise MemoryServiceError for errors of the connection."""
    try:
        yield
    except OSError as error:
        raise MemoryServiceError(f"the connection to it failed: {error}") from error
