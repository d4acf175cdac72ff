"""Identity of the process behind an offer.

It differs on another host, in another container, and for a later process with the same id.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar

import msgspec

from engine.transfer.base import NotFromHere, TransferError


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """A process, distinct from every other one."""

    pid: int
    start: int
    """Start time in clock ticks since the host booted."""
    boot: str
    """Id of the host's boot."""
    namespace: str
    """PID namespace in which the process has this pid."""


class _HasProcess(Protocol):
    @property
    def process(self) -> ProcessId: ...


OwnerT = TypeVar("OwnerT", bound=_HasProcess)
MemoryT = TypeVar("MemoryT")


class Mappings(Generic[OwnerT, MemoryT]):
    """Memory of peers on this host, mapped into ours.

    `open_one` maps the memory of one peer; the mappings live as long as their objects.
    """

    def __init__(self, open_one: Callable[[OwnerT], list[MemoryT]]) -> None:
        self._open_one = open_one
        self._lock = Lock()
        self._peers: dict[OwnerT, list[MemoryT]] = {}

    def of(self, owner: OwnerT) -> list[MemoryT]:
        """Return the mappings of a peer, opened on first use.

        Mappings of dead peers are dropped, and unmapped once no thread uses them.

        Raises NotFromHere, also for a process that died: the peer's other offers are then tried and fail the same way.
        """
        with self._lock:
            for other in [other for other in self._peers if not lives(other.process)]:
                del self._peers[other]
            if owner not in self._peers:
                check_reachable(owner.process)
                self._peers[owner] = self._open_one(owner)
            return self._peers[owner]

    def clear(self) -> None:
        self._peers.clear()


def this_process() -> ProcessId:
    return ProcessId(os.getpid(), _start(os.getpid()), _boot(), _namespace())


def check_reachable(process: ProcessId) -> None:
    """Raises NotFromHere unless the process runs on this host and in this container."""
    if process.boot != _boot():
        raise NotFromHere("the peer is on another host")
    if process.namespace != _namespace():
        raise NotFromHere("the peer is in another container")
    if not lives(process):
        raise NotFromHere(f"process {process.pid} is gone")


def check_survived(process: ProcessId) -> None:
    """Raises TransferError if the process has died meanwhile: the bytes read from its memory may be anything."""
    if not lives(process):
        raise TransferError(f"process {process.pid} died while it was read")


def lives(process: ProcessId) -> bool:
    try:
        return _start(process.pid) == process.start
    except OSError:
        return False


def _start(pid: int) -> int:
    """Return the start time of a process. Raises OSError if it is gone; a zombie counts as gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
