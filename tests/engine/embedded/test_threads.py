"""How many threads compute: as configured, or the cores that a process in a container may use."""

from pathlib import Path

import pytest

from engine.embedded.threads import compute_threads


@pytest.fixture(autouse=True)
def bound_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "300000 100000\n"}, 3),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_containers_quota_bounds_them(tmp_path: Path, files: dict[str, str], threads: int) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert compute_threads(cgroup=tmp_path) == threads


def test_the_configured_number_of_threads_wins(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    assert (compute_threads(5, tmp_path), compute_threads(0, tmp_path)) == (5, 1)
