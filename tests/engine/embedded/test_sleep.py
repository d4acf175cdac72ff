"""The embedded engine asleep: memory goes back to the system, tokens stay the same, events say where blocks are."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from engine.config import EmbeddedConfig, SleepConfig
from engine.embedded.core import EngineCore
from engine.embedded.kv.memory import discard, shared_zeros
from engine.embedded.kv.weighing import Speeds
from engine.embedded.models.native.weights import zeros
from engine.errors import EngineFailure
from engine.kv_events import Cleared, KvEvent, Removed, Updated
from engine.sleep import TAGS
from tests.engine.embedded.models.native.test_native import make_folder
from tests.engine.embedded.test_equivalence import add
from tests.engine.embedded.test_tiered_engine import run
from tests.support.waiting import slowness

PROMPTS = [list(range(3, 60)), list(range(70, 100))]
KINDS: dict[str, dict[str, Any]] = {
    "native": {},
    "shared": {"kv_transfer": "auto"},
    "int8": {"quantization": "int8"},
    "transformers": {"attention": "sdpa"},
    "dummy": {"load_format": "dummy"},
    "draft": {"speculative": "draft", "speculative_min_speedup": 0},
}
SLOW = {"transformers", "dummy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights the compiled path takes."""
    return make_folder(tmp_path_factory.mktemp("model"))


def core_of(folder: Path, publish: Callable[[KvEvent], None] = lambda _: None, **options: Any) -> EngineCore:
    fixed: dict[str, Any] = {
        "sleep": SleepConfig(),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "kv_block_size": 8,
        "num_blocks": 40,
    }
    if options.get("speculative") == "draft":
        fixed["speculative_model"] = str(folder)
    return EngineCore(EmbeddedConfig(model=str(folder), **{**fixed, **options}), publish)


def asleep(core: EngineCore, level: int) -> None:
    while not core.release_memory(TAGS, level):
        core.poll()


def resident(*tensors: torch.Tensor) -> int:
    """Bytes of the tensors' own pages that take memory. /proc/self/pagemap has 64 bits for each page, the highest of
    which says that it is there (Documentation/admin-guide/mm/pagemap.rst). A mapping's size in /proc/self/smaps would
    count its neighbours too: the system joins mappings of one kind that touch."""
    pages = 0
    with open("/proc/self/pagemap", "rb") as entries:
        for tensor in tensors:
            first, last = tensor.data_ptr() // PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // PAGESIZE)
            entries.seek(first * 8)
            pages += int((numpy.frombuffer(entries.read((last - first) * 8), numpy.uint64) >> 63).sum())
    return pages * PAGESIZE


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in KINDS]
)
def test_tokens_are_the_same_after_both_levels(kind: str, model: Path) -> None:
    core = core_of(model, **KINDS[kind])
    before = run(core, PROMPTS)
    for level in (1, 2, 1):
        asleep(core, level)
        core.resume_memory(TAGS)
        assert run(core, PROMPTS) == before, level
        assert run(core, PROMPTS) == before, "from the blocks that were computed since"
    core.close()


@pytest.mark.parametrize("make", [zeros, shared_zeros])
def test_discarded_pages_take_no_memory_and_come_back_as_zeros(make: Callable[..., torch.Tensor]) -> None:
    before, tensor, after = (make((4 << 20,), torch.float32) for _ in range(3))
    for each in (before, tensor, after):
        each.fill_(1.0)
    address = tensor.data_ptr()
    assert resident(tensor) >= 16 << 20
    discard(tensor)
    assert not resident(tensor)
    assert resident(before, after) == 32 << 20 and before.all() and after.all()
    assert tensor.data_ptr() == address and not tensor.any()
    tensor.fill_(2.0)
    discard(tensor[1:1000])  # less than a page
    assert tensor.min() == 2.0


def test_a_core_gives_all_its_memory_back(model: Path) -> None:
    core = core_of(model, num_blocks=4000)
    panels, cache = core.runner._weights._own, core.runner.memory.blocks[0]  # type: ignore[attr-defined]
    cache.fill_(1.0)
    assert resident(cache) > 0.9 * cache.nbytes and panels.any()
    asleep(core, 1)
    assert panels.any(), "weights are in memory of the host already"
    assert resident(cache) < 0.05 * cache.nbytes
    asleep(core, 2)
    assert not panels[: len(panels) // 4096 * 4096].any()
    core.resume_memory(TAGS)
    assert panels.any()
    core.close()


def test_a_sequence_has_to_end_first(model: Path) -> None:
    core = core_of(model)
    add(core, "0", PROMPTS[0], max_tokens=4)
    assert not core.release_memory(TAGS, 1)
    core.step()
    core.abort("0")
    asleep(core, 1)
    core.close()


def test_a_disk_that_hangs_does_not_keep_an_engine_awake(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do blocks that are copied to the host, though the engine's thread has no time for anything but the order."""
    core = core_of(model, kv_host_cache_mb=1, kv_disk_cache_mb=16, kv_disk_cache_dir=str(tmp_path))
    assert core.tiers is not None
    goes_on, write = threading.Event(), os.writev
    monkeypatch.setattr(os, "writev", lambda *arguments: goes_on.wait() and write(*arguments))
    add(core, "0", PROMPTS[0], max_tokens=4)
    while core.ready:
        core.step()
    deadline = time.monotonic() + 20 * slowness()
    while not core.release_memory(TAGS, 1):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert core.tiers.working, "the disk still writes"
    goes_on.set()
    core.resume_memory(TAGS)
    core.close()
    assert list(tmp_path.glob("*/0-*"))


def test_without_tiers_the_cache_is_cleared_and_with_tiers_blocks_stay_there(model: Path) -> None:
    events: list[KvEvent] = []
    core = core_of(model, events.append)
    run(core, PROMPTS)
    asleep(core, 1)
    assert isinstance(events[-1].data, Cleared)
    core.close()
    events.clear()
    core = core_of(model, events.append, kv_host_cache_mb=1)
    assert core.tiers is not None
    core.tiers.speeds = Speeds(1.0, (0.0,), (0.0,))  # loading is always faster
    before = run(core, PROMPTS)
    stored = len(core.blocks.pools[0].keys)
    first = len(events)
    asleep(core, 2)
    moved = [event.data for event in events[first:]]
    assert not any(isinstance(data, Cleared) for data in moved)
    levels = [data.cache_level.new_value for data in moved if isinstance(data, Updated) and data.cache_level]
    gone = [key for data in moved if isinstance(data, Removed) for key in data.block_hashes]
    assert levels and set(levels) == {1} and len(levels) + len(gone) == stored
    core.resume_memory(TAGS)
    assert run(core, PROMPTS) == before
    assert core.tiers.stats()[0].hit_blocks > 0, "a prefix comes back from the host"
    core.close()


@pytest.mark.parametrize("attention", ["auto", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_files_that_have_changed_or_gone_are_not_loaded(attention: str, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    core = core_of(folder, attention=attention)
    before = run(core, PROMPTS)
    asleep(core, 2)
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "away")
    with pytest.raises(EngineFailure, match="have changed"):
        core.resume_memory(TAGS)
    weights.symlink_to(tmp_path / "nowhere")
    with pytest.raises(EngineFailure, match="cannot be read: "):
        core.resume_memory(TAGS)
    weights.unlink()
    shutil.copy(tmp_path / "away", weights)
    with pytest.raises(EngineFailure, match="have changed"):
        core.resume_memory(TAGS)
    weights.unlink()
    (tmp_path / "away").rename(weights)
    core.resume_memory(TAGS)
    assert run(core, PROMPTS) == before
    core.close()
