"""Environments of the processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path(*folders: str | Path) -> str:
    """A PYTHONPATH of `folders`, the project and what this machine has in it: it may keep its packages there."""
    return os.pathsep.join(filter(None, (*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH"))))


def bare(**variables: str) -> dict[str, str]:
    """`variables`, and of this process's environment only what Python needs to start and to find its packages."""
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {**needed, "PYTHONPATH": python_path(), **variables}
