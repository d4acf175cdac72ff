"""Default sizes fit the machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from server.cli import main, run
from server.compose import sizing
from server.compose.config import embedded_config
from server.compose.sizing import GIB, MIB, Machine, api_processes, embedding_transfer, sizes, standby
from server.doctor import check_embeddings
from server.process.gpus import Gpu, parse_gpus
from server.roles import missing_setting
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
    assert chosen(H200) == {"max_batch_size": 256, "max_num_tokens": 4352}
    small = replace(H200, gpus=(Gpu("NVIDIA L4", "575.1", 8.9, 23 * GIB),))
    assert chosen(small) == {"max_batch_size": 128, "max_num_tokens": 4224}
    assert chosen(H200, max_batch_size=64) == {"max_num_tokens": 4160}, "what is set stays, and counts"
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


def test_sizes_without_a_usable_gpu_are_those_of_a_cpu(folder: Path) -> None:
    assert chosen(replace(H200, torch="2.13.0+cpu"))["max_num_tokens"] == 1024
    assert chosen(H200, device="cpu")["max_batch_size"] == 256, "sixteen cores"
    assert chosen(LAPTOP)["max_batch_size"] == 64
    assert chosen(replace(LAPTOP, cores=1))["max_batch_size"] == 16


@pytest.mark.parametrize(
    ("machine", "settings", "expected"),
    [
        (LAPTOP, {}, ("imports", GIB)),
        (LAPTOP, {"engine_standby": "imports"}, ("imports", 0)),
        (LAPTOP, {"engine_standby": True}, ("model", 0)),
        (LAPTOP, {"engine_standby": False}, ("", 0)),
        (LAPTOP, {"engine_on_death": "exit"}, ("", 0)),
        (LAPTOP, {"engine": "fake"}, ("", 0)),
        (H200, {}, ("", 0)),
        (H200, {"memory_service": "/run/memory.sock"}, ("imports", 0)),
        (H200, {"device": "cpu"}, ("imports", GIB)),
    ],
)
def test_on_a_cpu_another_process_has_imported(
    machine: Machine, settings: dict[str, Any], expected: tuple[str, int]
) -> None:
    assert standby(Settings(**{"engine_standby": "auto", **settings}), machine) == expected


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
    monkeypatch.setattr("engine.embedded.models.load.forecast", lambda _: {})  # there are no weights
    config = embedded_config(Settings(), folder)
    assert (config.max_batch_size, config.kv_cache_memory_mb, config.max_seq_len) == (64, 512, 0)
    assert main(["config", "--model", str(folder), "--device", "cpu", "--max-num-tokens", "77"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sized = {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in lines if "  # " in line}
    assert sized["MAX_BATCH_SIZE=64"] == "chosen by device: 16 for each of 4 cores"
    assert sized["KV_CACHE_MEMORY_MB=512"] == "chosen by device: 1/4 of 2.0 GiB of free memory"
    assert sized["MAX_NUM_TOKENS=77"] == "flag"
    assert sized["MAX_SEQ_LEN=8192"] == "chosen by device: the model's own"
    assert sized["THREADS=4"] == "chosen by device: one for each available core"
    assert sized["API_PROCESSES=1"] == "chosen by device: it keeps up with an engine on a CPU"


@pytest.mark.parametrize(
    ("given", "machine", "way"),
    [
        ({}, H200, None),
        ({"encode_urls": "http://127.0.0.1:8100"}, H200, "direct"),
        ({"encode_urls": "http://127.0.0.1:8100"}, LAPTOP, "front"),
        ({"encode_urls": "http://127.0.0.1:8100", "device": "cpu"}, H200, "front"),
        ({"encode_urls": "http://127.0.0.1:8100", "engine": "trtllm"}, H200, "front"),
        ({"encode_urls": "http://127.0.0.1:8100", "embedding_transfer": "front"}, H200, "front"),
        ({"disaggregation_mode": "encode"}, H200, "direct"),
        ({"disaggregation_mode": "encode", "embedding_transfer": "direct"}, LAPTOP, "direct"),
    ],
)
def test_the_way_of_embeddings(given: dict[str, Any], machine: Machine, way: str | None) -> None:
    found = embedding_transfer(Settings(**given), machine)
    assert (found and found.value) == way
    if found is not None:
        finding = check_embeddings(found)
        assert finding.level == "ok" and ("stay with the encoder" in finding.text) == (way == "direct")


def test_only_the_embedded_engine_reads_embeddings_where_they_are() -> None:
    given: dict[str, Any] = {
        "encode_urls": "http://127.0.0.1:8100",
        "internal_secret": "s" * 16,
        "embedding_transfer": "direct",
    }
    assert missing_setting(Settings(**given)) is None
    lacking = missing_setting(Settings(**given, engine="trtllm"))
    assert lacking is not None and lacking[0] == "--embedding-transfer (EMBEDDING_TRANSFER)"


def test_config_says_what_an_h200_gets(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of docs/production.md, from what the driver says of an H200."""
    gpus = parse_gpus("NVIDIA H200, 575.57.08, 9.0, 143771, GPU-1\n")
    machine = Machine(gpus, 0, "2.13.0", cores=16, memory=128 * GIB, free=100 * GIB)
    for module in ("config", "listing"):
        monkeypatch.setattr(f"server.compose.{module}.this_machine", lambda: machine)
    monkeypatch.setattr("engine.embedded.models.load.forecast", lambda _: {})
    assert main(["config", "--model", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    sized = {line.split("  # ")[0].strip(): line.split("  # ")[1] for line in lines if "chosen by device" in line}
    assert sized == {
        "MAX_BATCH_SIZE=256": "chosen by device: for NVIDIA H200 with 140 GiB",
        "MAX_NUM_TOKENS=4352": "chosen by device: 4096 tokens of prompts for NVIDIA H200 with 140 GiB, and the batch",
        "KV_CACHE_MEMORY_MB=0": "chosen by device: FREE_GPU_MEMORY_FRACTION of the memory that the weights leave",
        "MAX_SEQ_LEN=8192": "chosen by device: the model's own",
        "API_PROCESSES=4": "chosen by device: 1 for each 4 of 16 cores beside a GPU, 4 at most",
    }


@pytest.mark.parametrize(
    ("cores", "settings", "count"),
    [
        (16, {}, 4), (64, {}, 4), (8, {}, 2), (4, {}, 1), (2, {}, 1), (16, {"device": "cpu"}, 1),
        (16, {"engine": "fake"}, 1),
        (16, {"engine": "trtllm"}, 4), (16, {"engine_process": False}, 1), (16, {"model": "smolvision"}, 1),
        (16, {"disaggregation_mode": "decode"}, 4), (16, {"disaggregation_mode": "router"}, 1),
        (16, {"disaggregation_mode": "encode"}, 1), (16, {"dynamo": True}, 1),
    ],
)  # fmt: skip
def test_api_processes_follow_the_cores_beside_a_gpu(cores: int, settings: dict[str, Any], count: int) -> None:
    machine = replace(H200, cores=cores)
    assert api_processes(Settings(**settings), None, machine).value == count
    assert api_processes(Settings(**settings), None, replace(machine, gpus=())).value == 1


def test_a_model_that_takes_images_has_one_api_process(folder: Path) -> None:
    assert api_processes(Settings(), folder, H200).value == 4
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "qwen2_vl", "vision_config": {}}))
    assert api_processes(Settings(), folder, H200) == (1, "each would load what encodes the model's media")
    assert api_processes(Settings(engine="trtllm"), folder, H200).value == 4, "the engine has it"
    (folder / "config.json").write_text("{")
    assert api_processes(Settings(), folder, H200).value == 4, "the engine says what is wrong"


def test_a_start_on_a_gpu_takes_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, spare = [], AsyncMock()

    def serve(settings: Settings, *given: Any, **named: Any) -> int:
        assert spare in (*given, *named.values()), "the process that was spawned ahead is passed on"
        started.append(settings.api_processes)
        return 0

    async def spare_host(settings: Settings) -> Any:
        return spare

    monkeypatch.setattr(sizing, "this_machine", lambda: H200)
    for function, stand_in in {"launch.launch": serve, "serving.serve": serve, "spare.spare_host": spare_host}.items():
        monkeypatch.setattr(f"server.process.{function}", stand_in)
    monkeypatch.setattr(
        "engine.checkpoints.hub.config_folder", lambda model: folder if model == "owner/vision" else None
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "qwen2_vl", "vision_config": {}}))
    for settings in ({}, {"model": "owner/text"}, {"model": "owner/vision"}, {"api_processes": 3}, {"device": "cpu"}):
        assert run(Settings(port=0, **settings), [], 0.0) == 0
    assert started == [4, 4, 1, 3, 1] and spare.close.await_count == 5
