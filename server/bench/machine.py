"""A description of the machine, the commit and the versions, on which measured figures depend."""

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch",
    "transformers",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "sse-starlette",
    "llguidance",
    "xgrammar",
    "triton",
    "flashinfer-python",
)


def describe_machine() -> dict[str, object]:
    """Describe the machine and the software."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "cpu": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        "versions": ", ".join(_versions()),
    }


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _commit() -> str:
    """Return the commit of the working tree, marked if there are changes; "unknown" without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + (" with changes" if changes.stdout else "")
