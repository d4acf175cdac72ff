"""The command line that runs one of our modules in a process of its own."""

import sys
from pathlib import Path

_LAUNCHER = Path(__file__).resolve().parents[2] / "trellis.py"


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return a command that runs a module of this installation, never one of the current folder."""
    return (sys.executable, "-P", str(_LAUNCHER), "-m", module, *arguments)
