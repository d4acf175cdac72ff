"""The command line that runs one of our modules in a process of its own, and the end of such a process."""

import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path

_LAUNCHER = Path(__file__).resolve().parents[2] / "trellis.py"


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return a command that runs a module of this installation, never one of the current folder."""
    return (sys.executable, "-P", str(_LAUNCHER), "-m", module, *arguments)


def kill(process: Process) -> None:
    """Kill a process, unless it has ended.

    asyncio's own method asks first whether the process has ended. If it has, and the event loop does not know yet, the
    exit code is lost: `wait` then returns 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
