"""Memory of this machine, or of the container if it has less."""

import os
import re
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files with a container's limit and usage, and the line of file caches within the usage, for cgroup v2 and v1."""


def host_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes of memory of the machine, or of the container if it has fewer."""
    limits = [limit for limit, _ in _limits(cgroup)]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def free_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes of free memory; file caches count as free."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    of_machine = int(found[1]) << 10 if found else host_memory(cgroup) // 2
    return max(0, min([of_machine, *(limit - used for limit, used in _limits(cgroup))]))


def _limits(cgroup: Path) -> list[tuple[int, int]]:
    """Return the container's limit and its usage without file caches; nothing without a limit."""
    found = (
        (_number(cgroup / limit), (_number(cgroup / used) or 0) - (_number(cgroup / stat, caches) or 0))
        for limit, used, stat, caches in _LIMITS
    )
    return [(limit, used) for limit, used in found if limit is not None]


def _number(file: Path, name: str = "") -> int | None:
    """Return the number in a file, alone or behind a name."""
    try:
        text = file.read_text()
        return int(dict(line.split() for line in text.splitlines())[name] if name else text)
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return None
