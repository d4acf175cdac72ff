"""Which process an offer is from, so that no other is taken for it: on another host, in another container, or with its id later."""

import os
from pathlib import Path

import msgspec

from engine.transfer.base import NotFromHere


class Process(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    start: int
    """Clock ticks between the host's boot and the process's start."""
    boot: str
    namespace: str
    """The one in which the process has this id."""


def this_process() -> Process:
    return Process(os.getpid(), _start(os.getpid()), _boot(), _namespace())


def check_reachable(process: Process) -> None:
    """Raises NotFromHere unless it runs on this host, in this container."""
    if process.boot != _boot():
        raise NotFromHere("the peer is on another host")
    if process.namespace != _namespace():
        raise NotFromHere("the peer is in another container")
    if not lives(process):
        raise NotFromHere(f"process {process.pid} is gone")


def lives(process: Process) -> bool:
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
