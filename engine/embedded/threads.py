"""The number of threads that compute."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def compute_threads(configured: int = 0, cgroup: Path = _CGROUP) -> int:
    """Return `configured`, or else the number of cores that the process may use.

    Those are the cores that it is bound to, and no more than its container's quota (`docker run --cpus`, limits.cpu of
    Kubernetes): more threads only use the quota up earlier, and then all of them stand still until its next period.
    """
    return configured or min(_bound_to(), _quota(cgroup))


def _bound_to() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota(cgroup: Path) -> int:
    """Return the quota in whole cores, at least one, from cgroup v2's cpu.max or v1's cpu.cfs_quota_us; a large
    number without a limit."""
    try:
        if (file := cgroup / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(1, int(quota) // int(period)) if int(quota) > 0 else 1 << 30
    except (OSError, ValueError):  # none, or "max"
        return 1 << 30
