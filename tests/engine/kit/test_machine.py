"""Memory of the machine and of its container."""

from pathlib import Path

from engine.kit.machine import free_memory, host_memory


def test_memory_is_the_containers_where_it_has_less(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert free_memory(tmp_path, tmp_path / "meminfo") == 4000 << 10
    assert host_memory(tmp_path) > 1 << 20
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert host_memory(tmp_path) == 3000000
    assert free_memory(tmp_path, tmp_path / "meminfo") == 2000000
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 900000\ninactive_file 700000\n")
    assert free_memory(tmp_path, tmp_path / "meminfo") == 2700000, "file caches count as free"
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path, tmp_path / "meminfo") == 4000 << 10


def test_memory_of_a_container_of_cgroup_v1(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:    4000 kB\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("3000000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("1000000\n")
    (tmp_path / "memory/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 700000\n")
    assert free_memory(tmp_path, tmp_path / "meminfo") == 2700000
