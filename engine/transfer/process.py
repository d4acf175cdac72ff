"""Which process an offer is from, so that no other is taken for it: on another host, in another container, or with its id later."""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar

import msgspec

from engine.transfer.base import NotFromHere, TransferError


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    start: int
    """Clock ticks between the host's boot and the process's start."""
    boot: str
    namespace: str
    """The one in which the process has this id."""


class _HasProcess(Protocol):
    @property
    def process(self) -> ProcessId: ...


OwnerT = TypeVar("OwnerT", bound=_HasProcess)
MemoryT = TypeVar("MemoryT")


class Mappings(Generic[OwnerT, MemoryT]):
    """The memory of peers on this host, in ours: `open_one` maps that of one, which objects then keep open as long as they live."""

    def __init__(self, open_one: Callable[[OwnerT], list[MemoryT]]) -> None:
        self._open_one = open_one
        self._lock = Lock()
        self._peers: dict[OwnerT, list[MemoryT]] = {}

    def of(self, owner: OwnerT) -> list[MemoryT]:
        """That of peers that died is let go, which unmaps it once no thread reads from it any more. Raises NotFromHere, for a process that
        died too: its other offers are tried and say the same."""
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
    """Raises NotFromHere unless it runs on this host, in this container."""
    if process.boot != _boot():
        raise NotFromHere("the peer is on another host")
    if process.namespace != _namespace():
        raise NotFromHere("the peer is in another container")
    if not lives(process):
        raise NotFromHere(f"process {process.pid} is gone")


def check_survived(process: ProcessId) -> None:
    """Raises TransferError if it died meanwhile: what was read of its memory may be anything."""
    if not lives(process):
        raise TransferError(f"process {process.pid} died while it was read")


def lives(process: ProcessId) -> bool:
    try:
        return _start(process.pid) == process.start
    except OSError:
        return False


def _start(pid: int) -> int:
    """Raises OSError for a process that is gone; one that ended and was not waited for is gone too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
