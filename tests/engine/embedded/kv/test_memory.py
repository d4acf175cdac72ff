"""A KV cache takes no more memory than the machine or its container has."""

from pathlib import Path

import pytest

from engine.embedded.kv.memory import check_fits
from engine.errors import EngineFailure


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_containers_limit_counts(tmp_path: Path, file: str) -> None:
    limit = tmp_path / file
    limit.parent.mkdir(exist_ok=True)
    limit.write_text(f"{100 << 20}\n")
    check_fits(100, tmp_path)
    with pytest.raises(EngineFailure, match=r"^KV_CACHE_MEMORY_MB=101 is more than the 100 MiB of memory here$"):
        check_fits(101, tmp_path)


@pytest.mark.parametrize("content", ["max\n", "nonsense", None])
def test_without_a_limit_the_machine_counts(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "memory.max").write_text(content)
    check_fits(101, tmp_path)
    with pytest.raises(EngineFailure, match="is more than the"):
        check_fits(1 << 40, tmp_path)
