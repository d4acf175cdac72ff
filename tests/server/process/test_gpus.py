"""Which GPUs are there and shown, and that too few of them stop the start."""

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.cli import main
from server.compose.engine_args import Parallelism, parallelism
from server.doctor import GIB
from server.process import gpus
from server.process.gpus import Gpu, visible
from server.settings import Settings

H200 = Gpu("NVIDIA H200", "580.95.05", 9.0, 140 * GIB, "GPU-a1")
SPARK = Gpu("NVIDIA GB10", "580.95.05", 12.1, 0, "GPU-b2")
TWO_H200 = "NVIDIA H200, 580.95.05, 9.0, 143360, GPU-a1\nNVIDIA H200, 580.95.05, 9.0, 143360, GPU-a2"


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPUs chosen, and what a start does to the process' logs undone."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("TLLM_LOG_LEVEL", "INFO")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_answer_of_nvidia_smi() -> None:
    lines = [
        "NVIDIA H200, 580.95.05, 9.0, 143360, GPU-a1",
        "NVIDIA GB10, 580.95.05, 12.1, [N/A], GPU-b2",
        "Unable to determine, Error",
    ]
    assert gpus.parse_gpus("\n".join(lines)) == (H200, SPARK)
    assert gpus.parse_gpus(None) == ()
    assert gpus.parse_gpus("No devices were found\n") == ()


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        (None, [H200, SPARK]), ("0,1", [H200, SPARK]), ("1", [SPARK]), (" 1 , 0", [SPARK, H200]), ("", []), ("-1", []),
        ("0,2,1", [H200]),
        ("GPU-b2", [SPARK]), ("GPU-", []), ("GPU-c", []), ("NoDevFiles", []),
    ],
)  # fmt: skip
def test_cuda_visible_devices_chooses(devices: str | None, shown: list[Gpu]) -> None:
    assert visible((H200, SPARK), devices) == tuple(shown)
    assert visible((), devices) == ()


def test_parts_of_gpus_count_as_gpus_of_unknown_memory() -> None:
    assert [gpu.memory for gpu in visible((H200,), "MIG-1,MIG-2")] == [0, 0]


@pytest.mark.parametrize(
    ("script", "answer"), [("echo found", "found\n"), ("exit 9", None), ("exec sleep 60", None), (None, None)]
)
def test_nvidia_smi_may_fail_hang_or_be_missing(
    script: str | None, answer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "_QUERY_SECONDS", 0.5)
    assert gpus.nvidia_smi() == answer


@pytest.mark.parametrize(
    ("flags", "devices", "said"),
    [
        (
            ["--tensor-parallel-size", "4"],
            None,
            "tensor_parallel_size 4 (setting) needs 4 GPU(s), 2 are visible; ask for 2 in all",
        ),
        (
            ["--override-engine-args", '{"context_parallel_size": 4}'],
            None,
            "context_parallel_size 4 (OVERRIDE_ENGINE_ARGS) needs 4",
        ),
        (["--tensor-parallel-size", "2"], "1", "tensor_parallel_size 2 (setting) needs 2 GPU(s), 1 are visible"),
        (["--gpus-per-node", "3"], None, "gpus_per_node is 3, 2 GPU(s) are visible; set GPUS_PER_NODE to 2"),
        ([], "", "tensor_parallel_size 1 (default) needs 1 GPU(s), 0 are visible"),
        (
            ["--backend", "_autodeploy", "--override-engine-args", '{"world_size": 3}'],
            None,
            "world_size 3 (OVERRIDE_ENGINE_ARGS) needs 3",
        ),
    ],
)
def test_too_few_gpus_stop_the_start(
    flags: list[str],
    devices: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpus, "_QUERY", ("echo", TWO_H200))
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert main(["--engine", "trtllm", "--port", "0", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {said}")


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "2"],
        ["--tensor-parallel-size", "4", "--pipeline-parallel-size", "2", "--gpus-per-node", "2"],
        ["--backend", "_autodeploy", "--tensor-parallel-size", "8"],  # AutoDeploy does not look at it
        ["--tensor-parallel-size", "8", "--engine-address", "ipc:///elsewhere"],
    ],
)
def test_enough_gpus_and_several_nodes_go_on(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as opening the port, which is no address of this machine."""
    monkeypatch.setattr(gpus, "_QUERY", ("echo", TWO_H200))
    monkeypatch.setattr("server.cli.find_spec", lambda package: package)
    assert main(["--engine", "trtllm", "--host", "192.0.2.1", *flags]) == 1
    assert "cannot listen on 192.0.2.1" in capsys.readouterr().err


def test_a_machine_whose_gpus_cannot_be_counted_is_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "_QUERY", (str(tmp_path / "missing"),))
    monkeypatch.setattr("server.cli.find_spec", lambda package: package)
    assert main(["--engine", "trtllm", "--host", "192.0.2.1", "--tensor-parallel-size", "8"]) == 1
    assert "cannot listen on 192.0.2.1" in capsys.readouterr().err
    monkeypatch.setattr("server.cli.find_spec", lambda package: None)
    assert main(["--engine", "trtllm", "--host", "192.0.2.1"]) == 2
    assert "tensorrt_llm is not installed. Cure: " in capsys.readouterr().err


def test_copies_of_the_kv_cache_are_named() -> None:
    settings = Settings(engine="trtllm", tensor_parallel_size=4, enable_attention_dp=True)
    assert parallelism(settings) == Parallelism(4, 0, "tensor_parallel_size 4 (setting) with 4 KV caches")
