"""The memory service (`trellis memory`): owns the memory of weights, and outlives the engines that map it.

It holds one descriptor for each piece of memory: a memfd of the host, or device memory that the CUDA driver has
exported. It maps none of it, and has no CUDA context. An engine that is first to ask for some weights fills their
memory; from then on it is read-only. A lease ends when its connection does, however the engine has ended. Memory
without a lease is freed after a grace time, or at once when room is needed.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from engine.kit.logs import size_text
from engine.kit.machine import free_memory
from engine.memory import wire
from engine.memory.device import DeviceMemory
from engine.memory.wire import MemoryServiceError
from engine.transfer.shared_memory import make_memory, reopen

log = logging.getLogger(__name__)

GRACE_SECONDS = 300.0
"""Seconds for which memory is kept without a lease."""
_ACCEPT_PAUSE = 1.0
"""Seconds without new connections once no file descriptor is left."""
_MOST_FILES = 1024
"""Digests of files that are remembered."""


@dataclass(slots=True, eq=False)
class _Memory:
    """One piece of memory, of weights in one layout."""

    key: bytes
    device: str
    size: int
    fd: int
    ready: bool = False
    leases: "set[_ConnectedEngine]" = field(default_factory=set)
    waiting: "list[_ConnectedEngine]" = field(default_factory=list)
    """Connections that want a lease once it has been filled."""
    expiry: asyncio.TimerHandle | None = None


class MemoryService:
    """Serves leases on a Unix socket, until `close`. Runs on one event loop.

    `limit`: most bytes, of host and devices together; 0 is no limit. `grace`: as GRACE_SECONDS says.
    """

    def __init__(self, path: Path, limit: int = 0, grace: float = GRACE_SECONDS) -> None:
        self.path = path
        self._limit = limit
        self._grace = grace
        self._memories: dict[bytes, _Memory] = {}
        self._digests: dict[bytes, bytes] = {}
        """Digest of the weights' contents by that of their files."""
        self._devices: dict[str, DeviceMemory] = {}
        self._connections: set[_ConnectedEngine] = set()
        self._counts = {"granted": 0, "filled": 0, "refused": 0, "freed": 0}
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen. Raises OSError, also if a service answers there already."""
        self._loop = asyncio.get_running_loop()
        listener = wire.unix_socket()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_dead(self.path)
            mask = os.umask(0o077)
            try:
                listener.bind(str(self.path))
            finally:
                os.umask(mask)
            listener.listen(64)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._listen()

    def close(self) -> None:
        """Stop listening and free all memory. Engines keep what they have mapped."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()
        for memory in list(self._memories.values()):
            self._free(memory)

    @property
    def status(self) -> wire.Status:
        owned = [
            wire.OwnedMemory(
                key=memory.key.hex(),
                device=memory.device,
                size=memory.size,
                leases=len(memory.leases),
                ready=memory.ready,
                waiting=len(memory.waiting),
            )
            for memory in self._memories.values()
        ]
        return wire.Status(owned, self._limit, **self._counts)

    def acquire(self, connection: "_ConnectedEngine", asked: wire.Acquire) -> None:
        """Answer at once, or when the engine that fills this memory has done so. Raises MemoryServiceError."""
        if asked.version != wire.VERSION:
            raise MemoryServiceError(f"it speaks version {wire.VERSION} of the protocol, not {asked.version}")
        if asked.size <= 0:
            raise MemoryServiceError("no memory was asked for")
        if asked.weights:
            if len(self._digests) >= _MOST_FILES:
                self._digests.clear()
            self._digests[asked.files] = asked.weights
        weights = self._digests.get(asked.files)
        if weights is None:
            connection.send(wire.Unknown())
            return
        key = blake3(repr((weights, asked.layout, asked.device)).encode()).digest()
        memory = self._memories.get(key)
        if memory is None:
            self._fill(connection, self._allocate(key, asked.device, asked.size))
        elif memory.size != asked.size:
            raise MemoryServiceError(f"memory of this digest has {memory.size} bytes, not {asked.size}")
        elif memory.ready:
            self._grant(connection, memory)
        else:
            memory.waiting.append(connection)
            connection.memory = memory
            connection.send(wire.Wait())

    def commit(self, connection: "_ConnectedEngine") -> None:
        """Seal the memory that a connection has filled, and grant it to those that wait for it. Raises
        MemoryServiceError."""
        memory = connection.memory
        if memory is None or memory.ready or connection not in memory.leases:
            raise MemoryServiceError("this connection fills no memory")
        if not memory.device:
            try:
                fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
            except OSError as error:
                raise MemoryServiceError("the memory is still mapped for writing") from error
        memory.ready = True
        self._counts["filled"] += 1
        log.info("%s of weights were filled (%s)", size_text(memory.size), memory.key.hex()[:8])
        connection.send(wire.Granted())
        waiting, memory.waiting = memory.waiting, []
        for other in waiting:
            self._grant(other, memory)

    def refuse(self, connection: "_ConnectedEngine", reason: str) -> None:
        self._counts["refused"] += 1
        log.warning("refused an engine's request: %s", reason)
        connection.send(wire.Refused(reason))

    def release(self, connection: "_ConnectedEngine") -> None:
        """End what a connection has: its lease, its place in a queue, or its filling, which the next in the queue
        begins again with new memory."""
        self._connections.discard(connection)
        memory, connection.memory = connection.memory, None
        if memory is None:
            return
        if connection in memory.waiting:
            memory.waiting.remove(connection)
            return
        memory.leases.discard(connection)
        if not memory.ready:
            self._begin_again(memory)
        elif not memory.leases:
            memory.expiry = self._loop.call_later(self._grace, self._free, memory)

    def _begin_again(self, memory: _Memory) -> None:
        waiting = memory.waiting
        self._free(memory)
        if not waiting:
            return
        first, *others = waiting
        try:
            replacement = self._allocate(memory.key, memory.device, memory.size)
        except MemoryServiceError as error:
            for connection in waiting:
                connection.memory = None
                self.refuse(connection, str(error))
            return
        replacement.waiting = others
        for connection in others:
            connection.memory = replacement
        self._fill(first, replacement)

    def _fill(self, connection: "_ConnectedEngine", memory: _Memory) -> None:
        memory.leases.add(connection)
        connection.memory = memory
        connection.send(wire.Fill(), memory.fd)

    def _grant(self, connection: "_ConnectedEngine", memory: _Memory) -> None:
        try:
            fd = os.dup(memory.fd) if memory.device else reopen(memory.fd)
        except OSError as error:  # no file descriptor is left, and others may wait for an answer
            connection.memory = None
            self.refuse(connection, f"its memory cannot be opened: {error.strerror}")
            return
        if memory.expiry is not None:
            memory.expiry.cancel()
            memory.expiry = None
        memory.leases.add(connection)
        connection.memory = memory
        self._counts["granted"] += 1
        try:
            connection.send(wire.Granted(), fd)
        finally:
            os.close(fd)

    def _allocate(self, key: bytes, device: str, size: int) -> _Memory:
        """Allocate memory, and free what has no lease if room is needed. Raises MemoryServiceError if there is still no
        room."""
        unused = [memory for memory in self._memories.values() if not memory.leases]  # the longest unused comes first
        unused.sort(key=lambda memory: memory.expiry.when() if memory.expiry is not None else 0.0)
        leased = sum(memory.size for memory in self._memories.values() if memory.leases)
        if self._limit and leased + size > self._limit:
            unused.clear()  # without them there is no room either
        while True:
            taken = sum(memory.size for memory in self._memories.values())
            full = f"it holds {size_text(taken)} of at most {size_text(self._limit)}"
            if not self._limit or taken + size <= self._limit:
                try:
                    fd = self._make(device, size)
                    break
                except MemoryServiceError as error:
                    full = str(error)
            if not unused:
                raise MemoryServiceError(f"there is no room for {size_text(size)}: {full}")
            self._free(unused.pop(0))
        memory = self._memories[key] = _Memory(key, device, size, fd)
        return memory

    def _make(self, device: str, size: int) -> int:
        """Return a descriptor of new memory. Raises MemoryServiceError."""
        if device:
            if device not in self._devices:
                self._devices[device] = DeviceMemory(device)
            return self._devices[device].allocate(size)
        if size > (free := free_memory()):
            raise MemoryServiceError(f"{size_text(free)} of the host's memory are free")
        try:
            return make_memory(size)
        except OSError as error:
            raise MemoryServiceError(f"the system gives no memory: {error}") from error

    def _free(self, memory: _Memory) -> None:
        """Give up memory. It is gone once no engine maps it any more."""
        if memory.expiry is not None:
            memory.expiry.cancel()
        if self._memories.get(memory.key) is memory:
            del self._memories[memory.key]
        if memory.device:
            self._devices[memory.device].free(memory.fd)
        else:
            os.close(memory.fd)
        if memory.ready:
            self._counts["freed"] += 1
            log.info("freed %s of weights (%s)", size_text(memory.size), memory.key.hex()[:8])

    def _listen(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no file descriptor is left: the same engine would be announced again at once
            log.error("an engine cannot connect: %s", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_PAUSE, self._listen)
            return
        accepted.setblocking(False)
        if _user_of(accepted) == os.geteuid():
            self._connections.add(_ConnectedEngine(self, accepted))
        else:
            accepted.close()


class _ConnectedEngine:
    """The connection of one engine."""

    def __init__(self, service: MemoryService, connected: socket.socket) -> None:
        self.memory: _Memory | None = None
        """The memory that this engine leases, fills or waits for."""
        self._service = service
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connected, self._read)

    def send(self, answer: wire.Answer, *fds: int) -> None:
        """Send, or close the connection if that is impossible."""
        try:
            wire.send(self._socket, answer, *fds)
        except OSError:
            self._loop.call_soon(self.close)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._service.release(self)

    def _read(self) -> None:
        try:
            request = wire.receive_request(self._socket)
        except BlockingIOError:
            return
        except OSError:
            request = None
        except ValueError as error:
            self._service.refuse(self, f"the request cannot be read: {error}")
            return
        try:
            match request:
                case None:
                    self.close()
                case wire.AskStatus():
                    self.send(self._service.status)
                case wire.Commit():
                    self._service.commit(self)
                case _ if self.memory is not None:
                    raise MemoryServiceError("a connection holds one lease")
                case wire.Acquire():
                    self._service.acquire(self, request)
        except MemoryServiceError as error:
            self._service.refuse(self, str(error))


def _remove_dead(path: Path) -> None:
    """Remove the socket of a service that was killed. Raises OSError if one answers there."""
    with contextlib.closing(wire.unix_socket()) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not path.is_socket():
                raise OSError("a file that is not a socket is in its place") from None
            path.unlink(missing_ok=True)
            return
    raise OSError(f"a memory service already answers at {path}")


def _user_of(connected: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)
