"""KV blocks over NIXL, whose UCX backend chooses the fastest path: NVLink within a host, RDMA between hosts.

The measured behaviour of UCX under failures (docs/decisions/0012) shapes this file:

- Releasing a request does not stop it: bytes still arrived afterwards. A transfer therefore proceeds in pieces, and
  cancelling waits for the current piece.
- Destroying the agent does stop it. Each peer is therefore read by an agent of its own; if a piece does not end within
  GRACE seconds of its cancellation (the peer hangs), its agent is destroyed, and memory is no longer written.
- If a peer dies, its requests fail with "remote disconnect" within milliseconds. Its agent is then discarded.
- Where hosts share neither NVLink nor RDMA, UCX reads over TCP, where the *owner* sends; UCX aborted the owner's
  process in 2 of 14 cases in which the reader was killed meanwhile. The method `auto` therefore uses NIXL for host
  memory only where there is RDMA (`has_rdma`), and engine/transfer/tcp.py elsewhere.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from threading import Event, Lock
from types import ModuleType
from typing import Any
from uuid import uuid4

import msgspec

from engine.transfer.base import (
    NotFromHere,
    Offer,
    Read,
    Region,
    TransferError,
    check_cancelled,
    check_remote,
    decode_offer,
    split_reads,
)

HOST_PIECE = 32 << 20
DEVICE_PIECE = 1 << 30
"""Bytes of one request. They take some milliseconds, which is how long a cancellation takes."""
PIECE_READS = 1024
"""Maximum number of reads in one request."""
GRACE = 5.0
"""Seconds that a cancelled request may still take."""
POLL_SECONDS = 50e-6
PROGRESS_MICROSECONDS = 1000
"""Interval at which an agent's thread polls for events that UCX did not wake it for; 0 would make it spin."""
MOST_PEERS = 64
"""Maximum number of agents that read peers."""


class _NixlOwner(msgspec.Struct, frozen=True, array_like=True):
    """Content of an offer."""

    metadata: bytes
    regions: tuple[Region, ...]


class Nixl:
    """The method that uses NIXL.

    Raises TransferError where the package or its UCX backend is missing.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._nixl = _load()
        self._regions = regions
        self._agent = NixlAgent(self._nixl, regions, served=True)
        """Serves our regions to peers."""
        self.offer = Offer("nixl", msgspec.msgpack.encode(_NixlOwner(self._agent.metadata(), tuple(regions))))
        self._lock = Lock()
        self._peers: dict[bytes, NixlAgent] = {}
        self._connecting: dict[bytes, Lock] = {}

    def read(self, data: bytes, reads: Sequence[Read], cancelled: Event) -> None:
        owner = decode_offer(data, _NixlOwner)
        check_remote(reads, [region.size for region in owner.regions])
        agent = self._peer(owner)
        try:
            for piece in _pieces(reads, self._regions):
                check_cancelled(cancelled)
                agent.read(piece, owner.regions, cancelled)
        except TransferError:
            if not cancelled.is_set() or agent.closed:
                self._forget(owner, agent)
            raise

    def close(self) -> None:
        for agent in [*self._peers.values(), self._agent]:
            agent.close()
        self._peers.clear()

    def _peer(self, owner: _NixlOwner) -> "NixlAgent":
        with self._lock:
            if (known := self._peers.get(owner.metadata)) is not None:
                return known
            connecting = self._connecting.setdefault(owner.metadata, Lock())
        with connecting:  # one lock per peer: connecting to a dead one may take long
            with self._lock:
                if (known := self._peers.get(owner.metadata)) is not None:
                    return known
            return self._connect(owner)

    def _connect(self, owner: _NixlOwner) -> "NixlAgent":
        agent = NixlAgent(self._nixl, self._regions, served=False)
        crowded = []
        try:
            agent.connect(owner.metadata)
        except BaseException:
            agent.close()
            with self._lock:
                self._connecting.pop(owner.metadata, None)
            raise
        with self._lock:
            self._connecting.pop(owner.metadata, None)
            self._peers[owner.metadata] = agent
            while len(self._peers) > MOST_PEERS:
                crowded.append(self._peers.pop(next(iter(self._peers))))
        for other in crowded:
            other.close()
        return agent

    def _forget(self, owner: _NixlOwner, agent: "NixlAgent") -> None:
        with self._lock:
            if self._peers.get(owner.metadata) is agent:
                del self._peers[owner.metadata]
        agent.close()


class NixlAgent:
    """A NIXL agent with our regions registered.

    It serves them to peers by a thread of its own (`served`), or reads one peer, by polling.

    All calls into NIXL's agent are made under its lock.
    """

    def __init__(self, nixl: ModuleType, regions: Sequence[Region], served: bool) -> None:
        self._nixl = nixl
        self._regions = regions
        self._lock = Lock()
        self._requests: set[int] = set()
        self._peer = ""
        with _translated(nixl, TransferError):
            config = nixl.nixlAgentConfig()
            config.useProgThread = served
            config.pthrDelay = PROGRESS_MICROSECONDS
            self._agent: Any = nixl.nixlAgent(uuid4().hex, config)
            if "UCX" not in self._agent.getAvailPlugins():
                raise TransferError("NIXL has no UCX backend here")
            self._backends = [self._agent.createBackend("UCX", {})]
            for region in regions:
                described = nixl.nixlRegDList(
                    self._kind(region), [(region.address, region.size, max(region.device, 0), "")]
                )
                self._agent.registerMem(described, self._backends)

    @property
    def closed(self) -> bool:
        return self._agent is None

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> None:
        """Connect to a peer. Raises NotFromHere if UCX finds no path to it."""
        with self._lock, _translated(self._nixl, NotFromHere):
            self._peer = self._agent.loadRemoteMD(metadata).decode()
            self._agent.makeConnection(self._peer, self._backends)

    def read(self, reads: Sequence[Read], remote: Sequence[Region], cancelled: Event) -> None:
        """Read from one region; block until the bytes have arrived or can no longer arrive."""
        ours, theirs = self._regions[reads[0].region], remote[reads[0].region]
        local = [(ours.address + read.local_offset, read.size, max(ours.device, 0)) for read in reads]
        far = [(theirs.address + read.remote_offset, read.size, max(theirs.device, 0)) for read in reads]
        with self._calling():
            request: int = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._nixl.nixlXferDList(self._kind(ours), local),
                self._nixl.nixlXferDList(self._kind(theirs), far),
                self._peer,
                b"",
                self._backends,
            )
            self._requests.add(request)
            status = self._agent.postXferReq(request, b"")
        deadline = 0.0
        while status == self._nixl.NIXL_IN_PROG:
            time.sleep(POLL_SECONDS)
            if cancelled.is_set():
                deadline = deadline or time.monotonic() + GRACE
                if time.monotonic() > deadline:
                    self.close()
                    raise TransferError("cancelled; the peer hangs, so what was asked of it was torn down")
            with self._calling():
                status = self._agent.getXferStatus(request)
        with self._calling():
            self._requests.remove(request)
            self._agent.releaseXferReq(request)

    def close(self) -> None:
        """Destroy the agent. Afterwards memory is no longer written, whatever was in progress."""
        with self._lock:
            agent, self._agent = self._agent, None  # destroyed at the end of this call, which has the only reference
            if agent is None:
                return
            with contextlib.suppress(*_errors(self._nixl)):  # the peer may have died; the agent is destroyed anyway
                for request in self._requests:
                    agent.releaseXferReq(request)
                if self._peer:
                    agent.invalidateRemoteMD(self._peer)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        with self._lock, _translated(self._nixl, TransferError):
            if self._agent is None:
                raise TransferError("the peer died or hangs")
            yield

    def _kind(self, region: Region) -> object:
        return self._nixl.DRAM_SEG if region.device < 0 else self._nixl.VRAM_SEG


def _pieces(reads: Sequence[Read], regions: Sequence[Region]) -> Iterator[list[Read]]:
    """Yield requests: reads of one region each, together about as large as a piece."""
    for number, region in enumerate(regions):
        most = HOST_PIECE if region.device < 0 else DEVICE_PIECE
        piece: list[Read] = []
        size = 0
        for read in split_reads([read for read in reads if read.region == number], most):
            if piece and (size + read.size > most or len(piece) == PIECE_READS):
                yield piece
                piece, size = [], 0
            piece.append(read)
            size += read.size
        if piece:
            yield piece


@contextlib.contextmanager
def _translated(nixl: ModuleType, error_type: type[TransferError]) -> Iterator[None]:
    try:
        yield
    except _errors(nixl) as error:
        raise error_type(f"NIXL: {error}") from error


def _errors(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """Return NIXL's exception types, which have no common base."""
    return tuple(getattr(nixl, name) for name in dir(nixl) if name.startswith("nixl") and name.endswith("Error"))


def has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def _load() -> ModuleType:
    """Import NIXL's bindings.

    Its Python layer above them imports pickle, configures logging, and adds nothing that is used here.
    """
    try:
        return import_module("nixl_cu13._bindings")
    except ImportError as error:
        raise TransferError(f"the package nixl-cu13 is not installed, or cannot be loaded: {error}") from error
