"""Sizes that nobody set fit the machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.compose import sizing
from server.compose.config import embedded_config
from server.compose.sizing import GIB, MIB, Machine, sizes
from server.process.gpus import Gpu
from server.settings import Settings

CONFIG = {
    "model_type": "llama", "vocab_size": 384, "max_position_embeddings": 8192, "num_hidden_layers": 4,
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TOKEN = 4 * 2 * 2 * 64 * 4
"""Bytes of a token's keys and values in float32."""
LAPTOP = Machine((), 0, "2.13.0+cpu", cores=4, memory=16 * GIB, free=2 * GIB)
H200 = Machine((Gpu("NVIDIA H200", "575.1", 9.0, 140 * GIB),), 0, "2.13.0", cores=16, memory=128 * GIB, free=100 * GIB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def chosen(machine: Machine, folder: Path | None = None, **settings: Any) -> dict[str, int]:
    return {name: choice.value for name, choice in sizes(Settings(**settings), folder, machine).items()}


def test_on_a_gpu_they_follow_its_memory() -> None:
    assert chosen(H200) == {"max_batch_size": 256, "max_num_tokens": 8448}
    small = replace(H200, gpus=(Gpu("NVIDIA L4", "575.1", 8.9, 23 * GIB),))
    assert chosen(small) == {"max_batch_size": 128, "max_num_tokens": 4224}
    assert chosen(H200, max_batch_size=64) == {"max_num_tokens": 8256}, "what is set stays, and counts"
    assert "NVIDIA H200 with 140 GiB" in sizes(Settings(), None, H200)["max_batch_size"].why


@pytest.mark.parametrize(
    ("answer", "devices", "driver", "batch"),
    [
        (None, None, True, 64), (None, "0", True, 64), (None, None, False, 16), (None, "", True, 16),
        (None, "-1", True, 16), ("No devices were found\n", None, True, 16),
    ],
)  # fmt: skip
def test_a_driver_that_does_not_answer_has_a_gpu_of_unknown_memory(
    answer: str | None, devices: str | None, driver: bool, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "nvidia_smi", lambda: answer)
    monkeypatch.setattr(sizing, "visible_devices", lambda: devices)
    monkeypatch.setattr("server.process.gpus._DRIVER", (tmp_path / "none", tmp_path if driver else tmp_path / "no"))
    machine = replace(sizing.survey(), torch="2.13.0", cores=1)
    assert chosen(machine)["max_batch_size"] == batch and "kv_cache_memory_mb" in chosen(machine), "for either device"
    assert chosen(machine, device="cuda")["max_batch_size"] == 64


def test_without_a_gpu_or_a_build_that_uses_it_they_are_a_cpus(folder: Path) -> None:
    assert chosen(replace(H200, torch="2.13.0+cpu"))["max_num_tokens"] == 1024
    assert chosen(H200, device="cpu")["max_batch_size"] == 256, "sixteen cores"
    assert chosen(LAPTOP)["max_batch_size"] == 64
    assert chosen(replace(LAPTOP, cores=1))["max_batch_size"] == 16


def test_the_kv_cache_follows_free_memory_and_what_the_batch_can_use(folder: Path) -> None:
    everything = 64 * 8192 * TOKEN // MIB
    assert everything == 2048
    assert chosen(LAPTOP, folder)["kv_cache_memory_mb"] == 512, "a quarter of what is free"
    assert chosen(LAPTOP, folder, max_batch_size=4)["kv_cache_memory_mb"] == everything // 16, "all that four can use"
    assert chosen(LAPTOP, folder, max_seq_len=1024)["kv_cache_memory_mb"] == everything // 8
    assert chosen(LAPTOP, folder, dtype="bfloat16", max_batch_size=4)["kv_cache_memory_mb"] == everything // 32
    several = chosen(LAPTOP, folder, disaggregation_mode="decode")
    assert several["kv_cache_memory_mb"] == 256, "such replicas come in numbers"
    assert "kv_cache_memory_mb" not in chosen(LAPTOP, folder, kv_cache_memory_mb=7)


def test_the_context_is_what_the_kv_cache_holds(folder: Path) -> None:
    assert "max_seq_len" not in chosen(LAPTOP, folder)
    assert chosen(LAPTOP, folder, kv_cache_memory_mb=16)["max_seq_len"] == 16 * MIB // TOKEN
    assert "max_seq_len" not in chosen(LAPTOP, folder, kv_cache_memory_mb=16, max_seq_len=8000), "as it is set"


def test_layers_with_windows_get_a_fixed_amount(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"layer_types": ["sliding_attention"] * 4}))
    assert chosen(LAPTOP, folder)["kv_cache_memory_mb"] == 384
    (folder / "config.json").write_text("{")
    assert chosen(LAPTOP, folder)["kv_cache_memory_mb"] == 384


def test_the_engine_gets_them_and_config_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("config", "listing"):
        monkeypatch.setattr(f"server.compose.{module}.this_machine", lambda: LAPTOP)
    config = embedded_config(Settings(), folder)
    assert (config.max_batch_size, config.kv_cache_memory_mb, config.max_seq_len) == (64, 512, 0)
    assert main(["config", "--model", str(folder), "--device", "cpu", "--max-num-tokens", "77"]) in (0, 2)
    lines = capsys.readouterr().out.splitlines()
    sized = {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in lines if "  # " in line}
    assert sized["MAX_BATCH_SIZE=64"] == "chosen by device: 16 for each of 4 cores"
    assert sized["KV_CACHE_MEMORY_MB=512"] == "chosen by device: 1/4 of 2.0 GiB of free memory"
    assert sized["MAX_NUM_TOKENS=77"] == "flag"
