"""The descendants of a host, even if they have other parents now.

A process whose parent has died gets another one, and OpenMPI's daemon leaves the session of the process that starts it
(`orted --set-sid`). Both keep the environment, so a host has a mark there, which its descendants inherit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_VARIABLE = "TRELLIS_HOST"
_PROC = Path("/proc")
_DEAD = (b"Z", b"X")


class RunningProcess(NamedTuple):
    """A process by number and start time, since numbers are used again."""

    pid: int
    started: int
    """Clock ticks after the machine's start."""


def environment(mark: str) -> dict[str, str]:
    """Return the environment of a host whose processes have `mark`."""
    return {**os.environ, _VARIABLE: mark}


def own_mark() -> str:
    """Return the mark of this process; empty outside a host process."""
    return os.environ.get(_VARIABLE, "")


def kill(mark: str, seconds: float = 0.0) -> list[int]:
    """Kill the processes that have `mark`, except this one. Waits up to `seconds` until they are gone, which frees
    their GPU memory. Returns the remaining ones.
    """
    deadline = time.monotonic() + seconds
    while left := [pid for pid in _pids() if mark and pid != os.getpid() and _mark(pid) == mark]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # it became ours only if this is the first process here
                os.waitpid(pid, os.WNOHANG)
    return left


def descendants(pid: int) -> list[RunningProcess]:
    """Return the processes below `pid`, nearest first."""
    parents = {child: int(stat[1]) for child in _pids() if (stat := _stat(child))}
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return [process for child in found[1:] if (process := find(child))]


def find(pid: int) -> RunningProcess | None:
    """Return the process that has this number now."""
    stat = _stat(pid)
    return RunningProcess(pid, int(stat[19])) if stat else None


def runs(process: RunningProcess) -> bool:
    """Return whether a process has not ended."""
    stat = _stat(process.pid)
    return bool(stat) and stat[0] not in _DEAD and int(stat[19]) == process.started


def command(process: RunningProcess) -> list[str]:
    """Return the command line; empty if the process has ended."""
    return _read(process.pid, "cmdline").decode(errors="replace").split("\0")[:-1]


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()) if _PROC.is_dir() else iter(())


def _mark(pid: int) -> str:
    """Return the mark in the environment of a process; empty if it has none, has ended, or belongs to another user."""
    for variable in _read(pid, "environ").split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == _VARIABLE.encode():
            return value.decode()
    return ""


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on, the state; empty if the process has gone."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
