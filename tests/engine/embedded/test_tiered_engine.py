"""The engine with tiers: the same tokens as without, whatever is evicted, preempted, damaged or killed."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.kv.host_tier import ALIGNMENT, Device
from engine.embedded.kv.weighing import Speeds
from engine.stats import IterationStats
from tests.engine.embedded.kv.test_tiers import Store
from tests.engine.embedded.test_equivalence import add, tokens
from tests.support.window_models import save

BLOCK = 8
LOADS = Speeds(1.0, (0.0, 0.0), (0.0, 0.0))
"""Loading is always faster, also for a model that computes a block in no time."""


def core_of(folder: Path, **options: Any) -> EngineCore:
    fixed = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "kv_block_size": BLOCK,
        "num_blocks": 40,
        "max_seq_len": 256,
    }
    core = EngineCore(EmbeddedConfig(model=str(folder), **{**fixed, **options}), lambda _: None)
    if core.tiers is not None:
        core.tiers.speeds = LOADS
    return core


def run(core: EngineCore, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    """Return the output of each prompt; all run at once."""
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt, **{"max_tokens": 12, **sampling})
    found: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while core.busy:
        if not core.ready:
            time.sleep(0.001)
        for request_id, delta in core.step():
            found[request_id] += tokens([delta])
    core.scheduler.audit()
    return list(found.values())


def prompts_of(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 384) for _ in range(rng.randrange(length // 2, length))] for _ in range(count)]


def counted(core: EngineCore) -> dict[str, int]:
    stats: IterationStats = core.stats()
    return {tier.tier: tier.hit_blocks for tier in stats.tiers}


@pytest.fixture
def tiered(tiny_model: Path, tmp_path: Path) -> Iterator[EngineCore]:
    core = core_of(tiny_model, kv_host_cache_mb=1, kv_disk_cache_mb=16, kv_disk_cache_dir=str(tmp_path))
    yield core
    core.close()


def test_a_reset_forgets_what_has_just_been_read(tiered: EngineCore) -> None:
    [prompt] = prompts_of(3, 1, 60)
    run(tiered, [prompt])
    [pool] = tiered.blocks.pools
    pool.evict()
    add(tiered, "again", prompt, max_tokens=4)
    tiered.step()
    while tiered.scheduler.fetching:
        tiered.poll()
        time.sleep(0.001)
    [sequence] = tiered.scheduler.running
    tiered.reset_prefix_cache()
    while tiered.busy:
        tiered.step()
    assert tiered.tiers is not None and sequence.cached_tokens
    assert sequence.keys[0] not in pool and not tiered.tiers.host.has((0, sequence.keys[0]))


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_answers_are_the_same_while_conversations_do_not_fit(tiny_model: Path, tmp_path: Path, overlap: str) -> None:
    """Turn by turn, three at a time, with more conversations than the device holds; some are preempted."""
    plain = core_of(tiny_model, overlap_scheduler=overlap, num_blocks=200)
    tiers = {"kv_host_cache_mb": 1, "kv_disk_cache_mb": 16, "kv_disk_cache_dir": str(tmp_path)}
    tiered = core_of(tiny_model, overlap_scheduler=overlap, num_blocks=30, **tiers)
    talks = prompts_of(1, 6, 60)
    for turn in range(3):
        for first in (0, 3):
            asked = [talk + [5 + turn] * 9 for talk in talks[first : first + 3]]
            expected = run(plain, asked)
            assert run(tiered, asked) == expected
            talks[first : first + 3] = [prompt + output for prompt, output in zip(asked, expected, strict=True)]
    assert counted(tiered)["host"] > 20 and not any(tier.failures for tier in tiered.stats().tiers)
    tiered.close()


def test_preempted_sequences_return_from_the_host(tiny_model: Path) -> None:
    asked = prompts_of(2, 4, 50)
    expected = run(core_of(tiny_model, num_blocks=200), asked, max_tokens=60)
    core = core_of(tiny_model, num_blocks=20, kv_host_cache_mb=1, kv_offload_min_requests=9)
    assert run(core, asked, max_tokens=60) == expected
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.tiers[0].hit_blocks > 0 and stats.kv_transfer_success_total == 0
    core.close()


def test_windows_are_part_of_it(tmp_path: Path) -> None:
    folder = save("gemma3_text", tmp_path / "model")
    asked = prompts_of(3, 4, 100)
    plain = core_of(folder, num_blocks=200)
    expected = [run(plain, [prompt], max_tokens=4) for prompt in asked]
    core = core_of(
        folder, num_blocks=20, kv_host_cache_mb=1, kv_disk_cache_mb=16, kv_disk_cache_dir=str(tmp_path / "kv")
    )
    for _ in range(2):
        assert [run(core, [prompt], max_tokens=4) for prompt in asked] == expected
    assert counted(core)["host"] > 0
    core.close()


def test_an_engine_starts_again_on_its_folder_beside_another(
    tiered: EngineCore, tiny_model: Path, tmp_path: Path
) -> None:
    asked = prompts_of(4, 3, 80)
    expected = run(tiered, asked)
    others = [core_of(tiny_model, kv_host_cache_mb=1, kv_disk_cache_mb=16, kv_disk_cache_dir=str(tmp_path))]
    others.append(core_of(tiny_model, kv_host_cache_mb=1, kv_disk_cache_mb=16, kv_disk_cache_dir=str(tmp_path)))
    for other in others:
        assert run(other, asked) == expected and counted(other)["disk"] > 9
        other.close()


def test_an_engine_of_other_precision_does_not_use_the_files(tiered: EngineCore, tiny_model: Path) -> None:
    asked = prompts_of(4, 3, 80)
    run(tiered, asked)
    assert tiered.tiers is not None and tiered.tiers.disk is not None
    root = tiered.tiers.disk.folder.parent
    other = core_of(tiny_model, dtype="bfloat16", kv_host_cache_mb=1, kv_disk_cache_mb=16, kv_disk_cache_dir=str(root))
    run(other, asked)
    assert counted(other)["disk"] == 0
    other.close()


def test_flipped_bytes_do_not_change_an_answer(tiered: EngineCore, tiny_model: Path, tmp_path: Path) -> None:
    asked = prompts_of(5, 3, 80)
    expected = run(tiered, asked)
    files = sorted(tmp_path.glob("*/*-*"))
    rng = random.Random(0)
    for path in files:
        data = bytearray(path.read_bytes())
        data[rng.randrange(ALIGNMENT + tiered.runner.memory.block_bytes[0])] ^= 0x10  # what follows is not used
        path.write_bytes(data)
    assert len(files) > 9
    other = core_of(tiny_model, kv_host_cache_mb=1, kv_disk_cache_mb=16, kv_disk_cache_dir=str(tmp_path))
    assert run(other, asked) == expected and counted(other)["disk"] == 0
    other.close()


def test_a_full_disk_does_not_change_an_answer(
    tiered: EngineCore, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.writev", full)
    asked = prompts_of(6, 6, 80)
    expected = run(core_of(tiny_model, num_blocks=200), asked)
    assert run(tiered, asked) == run(tiered, asked) == expected
    host, disk = tiered.stats().tiers
    assert host.hit_blocks > 0 and disk.failures >= 1 and disk.num_blocks == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("disk_mb", [0, 16], ids=["host, write-combined", "host and disk"])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_on_a_gpu_answers_are_the_same(tiny_model: Path, tmp_path: Path, overlap: str, disk_mb: int) -> None:
    fixed: dict[str, Any] = {"device": "cuda", "overlap_scheduler": overlap}
    plain = core_of(tiny_model, num_blocks=200, **fixed)
    tiers = {"kv_host_cache_mb": 1, "kv_disk_cache_mb": disk_mb, "kv_disk_cache_dir": str(tmp_path)}
    tiered = core_of(tiny_model, num_blocks=30, **tiers, **fixed)
    asked = prompts_of(8, 6, 100)
    for _ in range(3):
        for prompt in asked:
            assert run(tiered, [prompt]) == run(plain, [prompt])
    assert counted(tiered)["host"] > 20 and not any(tier.failures for tier in tiered.stats().tiers)
    tiered.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("write_combined", [False, True])
def test_copies_of_a_gpu_are_exact(write_combined: bool) -> None:
    device = Device(torch.device("cuda"))
    memory = torch.randint(0, 256, (4, 1 << 20), dtype=torch.uint8, device="cuda")
    expected = memory.clone()
    address = device.allocate(memory.nbytes, write_combined=write_combined)
    assert address % ALIGNMENT == 0
    torch.cuda.synchronize()
    with device.copies() as copies:
        copies.copy(address, memory.data_ptr(), memory.nbytes)
        copies.wait()
        memory.zero_()
        torch.cuda.synchronize()
        copies.copy(memory.data_ptr(), address, memory.nbytes)
    assert torch.equal(memory, expected)
    device.close()


KILLED = """
import pathlib, random, sys
from tests.engine.embedded.kv.test_tiers import Store
store = Store(pathlib.Path(sys.argv[1]))
rng = random.Random(sys.argv[2])
print("ready", flush=True)
while True:
    store.ask(store.sequence([rng.randrange(3) for _ in range(13)]))
"""


def test_kills_leave_nothing_that_is_wrong(tmp_path: Path) -> None:
    """A process is killed while it writes; another goes on with its folder, and checks each block that it loads."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), "0"],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[3],
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        before = len(list(tmp_path.glob("*/*-*")))
        while len(list(tmp_path.glob("*/*-*"))) < before + 30:
            assert process.poll() is None
        process.kill()
    store = Store(tmp_path)
    rng = random.Random("0")
    for _ in range(60):
        store.ask(store.sequence([rng.randrange(3) for _ in range(13)]))
    store.settle()
    disk = store.tiers.stats()[1]
    assert disk.failures == 0 and disk.hit_blocks > 0
    store.tiers.close()
