"""Identity of the process behind an offer.

It differs on another host, in another container, and for a later process with the same id.
"""

import os
from pathlib import Path

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


def this_process() -> ProcessId:
    return ProcessId(os.getpid(), _start(os.getpid()), _boot(), _namespace())


def process_domain() -> str:
    """Return a name that processes have in common if they can read each other's memory: host and PID namespace."""
    return f"{_boot()}/{_namespace()}"


def shared_memory_domain() -> str:
    """Return a name that processes have in common if they see the same POSIX shared memory: host and IPC namespace."""
    return f"{_boot()}/{os.readlink('/proc/self/ns/ipc')}"


def check_reachable(process: ProcessId) -> None:
    """Check that the process runs on this host and in this container. Raises NotFromHere."""
    if process.boot != _boot():
        raise NotFromHere("the peer is on another host")
    if process.namespace != _namespace():
        raise NotFromHere("the peer is in another container")
    if not lives(process):
        raise NotFromHere(f"process {process.pid} is gone")


def check_survived(process: ProcessId) -> None:
    """Check that the process has not died meanwhile: the bytes read from its memory may be anything. Raises
    TransferError."""
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
