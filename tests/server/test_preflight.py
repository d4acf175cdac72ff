"""Impossible settings are found before anything is loaded, by `serve` and by `doctor`."""

import json
from asyncio import to_thread
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineFailure
from engine.memory.service import MemoryService
from server import doctor, preflight
from server.cli import main
from server.compose.config import engine_config
from server.compose.sizing import GIB, Machine
from server.preflight import impossible
from server.process.gpus import Gpu
from server.settings import Settings
from tests.support.gguf_files import write_gguf

CPU = Machine((), 0, "2.13.0+cpu", cores=2, memory=8 * GIB, free=6 * GIB)
H200 = Machine((Gpu("NVIDIA H200", "580.1", 9.0, 140 * GIB),), 0, "2.13.0", cores=16, memory=8 * GIB, free=6 * GIB)
A100 = replace(H200, gpus=(Gpu("NVIDIA A100", "580.1", 8.0, 80 * GIB),))
CONFIG = {"model_type": "llama", "vocab_size": 384, "max_position_embeddings": 512, "num_hidden_layers": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def problems(machine: Machine, folder: Path | None = None, **settings: Any) -> list[str]:
    found = list(impossible(Settings(**settings), machine, folder))
    assert all(finding.level == "problem" and finding.cure for finding in found)
    return [finding.text for finding in found]


@pytest.mark.parametrize(
    ("machine", "settings", "text"),
    [
        (CPU, {"kv_cache_memory_mb": 9000}, "KV_CACHE_MEMORY_MB=9000 is more than this machine has: 8.0 GiB of memory"),
        (CPU, {"device": "cuda"}, "DEVICE=cuda, but no NVIDIA GPU answers"),
        (replace(CPU, hidden=2), {"device": "cuda:1"}, "DEVICE=cuda:1, but CUDA_VISIBLE_DEVICES shows none of 2 GPUs"),
        (replace(H200, torch="2.13.0+cpu"), {"device": "cuda"}, "torch 2.13.0+cpu is built without CUDA"),
        (replace(CPU, gpus=None), {"device": "cuda"}, "torch 2.13.0+cpu is built without CUDA"),
        (H200, {"device": "cuda:1"}, "DEVICE=cuda:1, but 1 GPUs are visible"),
        (CPU, {"quantization": "fp8"}, "QUANTIZATION=fp8 needs an NVIDIA GPU of compute capability 9.0"),
        (H200, {"kv_cache_dtype": "fp8", "device": "cpu"}, "KV_CACHE_DTYPE=fp8 needs an NVIDIA GPU"),
        (CPU, {"compressed_weights": "on"}, "COMPRESSED_WEIGHTS=on needs an NVIDIA GPU of compute capability 9.0"),
        (A100, {"quantization": "fp8"}, "QUANTIZATION=fp8 needs compute capability 9.0, and NVIDIA A100 has 8.0"),
        (H200, {"quantization": "int8"}, "QUANTIZATION=int8 is for a CPU, and DEVICE=auto takes the GPU"),
        (
            CPU,
            {"quantization": "int8", "attention": "sdpa"},
            "int8 needs the compiled path, which ATTENTION=sdpa rules",
        ),
        (CPU, {"quantization": "int8", "dtype": "float16"}, "needs the compiled path, which DTYPE=float16 rules out"),
        (CPU, {"attention": "flashinfer"}, "ATTENTION=flashinfer needs an NVIDIA GPU"),
        (CPU, {"max_seq_len": 513}, "MAX_SEQ_LEN=513 is longer than the model's context of 512 tokens"),
        (CPU, {"chat_template": "/none.jinja"}, "CHAT_TEMPLATE=/none.jinja is not a file"),
        (CPU, {"kv_host_cache_mb": 9000}, "KV_HOST_CACHE_MB=9000 are more than this machine has: 8.0 GiB of memory"),
        (
            CPU,
            {"kv_host_cache_mb": 5000, "kv_cache_memory_mb": 5000},
            "KV_HOST_CACHE_MB=5000 and KV_CACHE_MEMORY_MB=5000 are more than",
        ),
        (
            CPU,
            {"kv_host_cache_mb": 9, "kv_disk_cache_mb": 9, "kv_disk_cache_dir": "/proc/kv"},
            "KV_DISK_CACHE_DIR=/proc/kv cannot be used",
        ),
        (
            CPU,
            {"kv_host_cache_mb": 9, "kv_disk_cache_mb": 1 << 40, "kv_disk_cache_dir": "/tmp"},
            "KV_DISK_CACHE_MB=1099511627776 is more than the disk of /tmp",
        ),
        (
            CPU,
            {"memory_service": "/run/memory.sock", "attention": "sdpa"},
            "MEMORY_SERVICE shares the weights of compiled code, which ATTENTION=sdpa rules out",
        ),
        (
            H200,
            {"memory_service": "/run/memory.sock", "attention": "sdpa"},
            "MEMORY_SERVICE shares the weights of compiled code, which ATTENTION=sdpa rules out",
        ),
        (H200, {"engine_standby": True}, "ENGINE_STANDBY=true needs MEMORY_SERVICE on a GPU"),
        (
            H200,
            {
                "engine_standby": True,
                "memory_service": "/run/memory.sock",
                "speculative": "draft",
                "speculative_model": "/draft",
            },
            "ENGINE_STANDBY=true cannot be used on a GPU with SPECULATIVE=draft",
        ),
        (
            H200,
            {"engine_standby": True, "memory_service": "/run/memory.sock", "disaggregation_mode": "prefill"},
            "ENGINE_STANDBY=true cannot be used on a GPU with DISAGGREGATION_MODE=prefill",
        ),
        (replace(CPU, torch=""), {}, "the embedded engine needs PyTorch, which is not installed"),
    ],
)
def test_each_impossible_setting_is_one_problem(
    machine: Machine, settings: dict[str, Any], text: str, folder: Path
) -> None:
    (found,) = problems(machine, folder, **settings)
    assert text in found


def test_possible_settings_have_no_findings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_installed", lambda package: True)
    assert problems(CPU, folder, max_seq_len=512, kv_cache_memory_mb=8000) == []
    assert problems(CPU, folder, quantization="int8", dtype="float32") == []
    assert problems(CPU, folder, memory_service="/run/memory.sock", engine_standby=True) == []
    assert problems(CPU, folder, engine_standby=True, disaggregation_mode="prefill") == []
    assert problems(H200, folder, memory_service="/run/memory.sock", engine_standby=True) == []
    assert problems(H200, folder, engine_standby="imports", disaggregation_mode="prefill") == []
    assert problems(H200, folder, quantization="fp8", kv_cache_memory_mb=9000) == [], "a GPU's cache is elsewhere"
    assert problems(replace(H200, gpus=None), folder, device="cuda:1") == [], "nvidia-smi did not answer"
    assert problems(replace(CPU, torch=""), engine="fake") == []
    assert problems(CPU, folder, engine="trtllm", max_seq_len=10000) == [], "TensorRT-LLM has rules of its own"
    assert problems(CPU, folder, disaggregation_mode="router", max_seq_len=10000) == []


def test_a_gguf_file_is_judged_before_it_is_converted(tmp_path: Path) -> None:
    model = str(write_gguf(tmp_path / "mine.gguf"))
    assert problems(CPU, model=model) == []
    assert problems(CPU, model=model, max_seq_len=513) == [
        "MAX_SEQ_LEN=513 is longer than the model's context of 512 tokens"
    ]
    (small,) = problems(replace(CPU, memory=1000), model=model)
    assert "the weights take 0.0 GiB" in small
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")  # what is wrong with it is said when it is opened
    assert problems(CPU, model=model, max_seq_len=513) == []


def test_weights_count(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(4 * GIB)
    assert problems(CPU, folder, kv_cache_memory_mb=4000) == []
    (both,) = problems(CPU, folder, kv_cache_memory_mb=5000)
    assert both.startswith("weights of 4.0 GiB and KV_CACHE_MEMORY_MB=5000 are more than this machine has")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(9 * GIB)
    (alone,) = problems(CPU, folder)
    assert alone.startswith("the weights take 9.0 GiB")
    assert problems(CPU, folder, load_format="dummy") == []


def test_serve_prints_a_paragraph_and_doctor_finds_it_first(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--model", str(folder), "--device", "cpu", "--max-seq-len", "9999", "--cache-dir", str(tmp_path)]
    assert main(["serve", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: MAX_SEQ_LEN=9999 is longer than the model's context of 512 tokens. "
        "Cure: MAX_SEQ_LEN=512 at most, or 0 for the model's\n"
    )
    assert main(["doctor", *flags]) == 1
    assert "problem  MAX_SEQ_LEN=9999 is longer" in capsys.readouterr().out


def test_a_context_that_is_too_long_is_found_after_a_download_too(folder: Path) -> None:
    with pytest.raises(EngineFailure, match="MAX_SEQ_LEN=513 is longer than the model's context of 512 tokens"):
        engine_config(Settings(max_seq_len=513), folder)


def test_the_doctor_looks_at_packages_the_compiler_and_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["pyzmq>=1", "uvicorn<0.1", "nonsense-package>=2"])
    (found,) = doctor.check_packages(Settings(engine="fake"), CPU)
    assert found.level == "problem"
    assert found.text.endswith("; nonsense-package>=2 is not installed") and "not <0.1; " in found.text
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["pyzmq>=1", "nothing; extra == 'otel'"])
    assert [finding.level for finding in doctor.check_packages(Settings(engine="fake"), CPU)] == ["ok"]
    monkeypatch.setenv("PATH", "/nowhere")
    compiler = doctor.check_compiler()
    assert compiler.level == "warning" and compiler.cure == "install g++"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = doctor.check_hub("owner/that-is-nowhere")
    assert hub.level == "problem" and "HF_TOKEN" in hub.cure
    assert doctor.check_machine(replace(CPU, free=GIB // 2)).level == "warning"


def test_a_standby_engine_needs_an_engine_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--engine-standby", "true", "--engine-address", "ipc:///run/engine.sock"]) == 2
    assert "ENGINE_STANDBY" in capsys.readouterr().err


async def test_the_doctor_asks_the_memory_service(tmp_path: Path) -> None:
    path = tmp_path / "memory.sock"
    missing = await to_thread(doctor.check_memory_service, path)
    assert missing.level == "warning" and "load weights of their own" in missing.text
    service = MemoryService(path)
    service.start()
    assert (await to_thread(doctor.check_memory_service, path)).level == "ok"
    service.close()
    switch = tmp_path / "shmem_enabled"
    for content, level in (("always [never] deny", "warning"), ("always [advise] never", "ok")):
        switch.write_text(content)
        assert doctor.check_large_pages(switch).level == level


@pytest.mark.parametrize(
    ("settings", "standby"),
    [
        ({}, ""),
        ({"memory_service": "/run/memory.sock"}, "imports"),
        ({"memory_service": "/run/memory.sock", "engine_standby": "false"}, ""),
        ({"engine_standby": "imports"}, "imports"),
        ({"engine_standby": "true"}, "model"),
    ],
)
def test_a_memory_service_brings_a_process_that_has_imported(settings: dict[str, Any], standby: str) -> None:
    assert Settings(**{"engine_standby": "auto", **settings}).standby == standby


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_disk_cache_mb": 9}, "set KV_HOST_CACHE_MB too"),
        ({"kv_host_cache_mb": 9, "enable_block_reuse": False}, "ENABLE_BLOCK_REUSE"),
        ({"kv_host_cache_mb": 9, "kv_disk_cache_mb": 9, "engine": "trtllm"}, "not trtllm's"),
        ({"memory_service": "/run/memory.sock", "engine": "fake"}, "the embedded engine, not of fake"),
        ({"memory_service": "/" + "long" * 30}, "at most 107 bytes"),
        ({"engine_standby": True, "engine": "trtllm"}, "cannot be loaded twice"),
        ({"engine_standby": "imports", "engine": "trtllm"}, "starts MPI"),
        ({"engine_standby": True, "engine_process": False}, "ENGINE_PROCESS=true"),
        ({"engine_standby": True, "engine_on_death": "exit"}, "ENGINE_ON_DEATH=exit"),
    ],
)
def test_settings_that_could_not_work_together_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings(**settings)
