"""Settings: one class, one example file, one help page, three places to set them from."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from engine.config import FakeConfig
from engine.embedded.models.native import levels
from server import cli
from server.cli import explain, main
from server.compose.config import engine_config
from server.doctor import check_environment
from server.process import logs
from server.process import serving as serving_module
from server.settings import Settings, example, read_settings
from server.settings.environment import read_env_file
from server.settings.reading import misspelt_variables
from tests.support.environment import bare
from tests.support.servers import serving

ROOT = Path(__file__).resolve().parents[2]


def test_example_file_lists_every_setting_in_order() -> None:
    assert (ROOT / "settings.env.example").read_text() == example(), "python -m server.settings > settings.env.example"


def test_example_file_sets_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        line.removeprefix("# ")
        for line in example().splitlines()
        if line.startswith("# ") and line[2:].partition("=")[0].isupper()
    ]
    assert len(lines) == len(Settings.model_fields)
    (tmp_path / ".env").write_text("\n".join(lines))
    defaults = Settings()
    monkeypatch.chdir(tmp_path)
    assert Settings() == defaults


def literal_defaults(files: Iterable[Path], value: Callable[[ast.expr], ast.expr]) -> Iterator[tuple[str, str, Any]]:
    """Class, field and default of the annotated fields whose default, found by `value`, is a literal."""
    for path in files:
        classes = (
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
        )
        for each in classes:
            for field in each.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                    default = value(field.value)
                    if isinstance(default, ast.Constant):
                        yield each.name, field.target.id, default.value


def test_no_default_is_written_twice() -> None:
    """What settings are handed to (engine configurations and limits) has the defaults; the settings refer to them."""
    settings = {
        name: default
        for _, name, default in literal_defaults(
            (ROOT / "server/settings").glob("*.py"),
            lambda call: call.args[0] if isinstance(call, ast.Call) and call.args else call,
        )
    }
    assert settings["port"] == 8000, "settings are found"
    product = [path for package in ("engine", "multimodal", "routers") for path in (ROOT / package).rglob("*.py")]
    ours = [
        path
        for path in product
        if not path.name.startswith("llm_")  # those are TensorRT-LLM's
        and re.search(r"^ *class \w+(Config|Limits)\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    fields = [field for field in literal_defaults(ours, lambda value: value) if field[0].endswith(("Config", "Limits"))]
    assert ("EmbeddedConfig", "max_batch_size", 32) in fields
    assert ("VisualConfig", "max_batch", 4) in fields, "a setting may have its subject before the name"
    names = [(owner, name, default) for owner, name, default in fields if name in settings]
    names += [(owner, f"visual_{name}", default) for owner, name, default in fields if owner.startswith("Visual")]
    assert [(owner, name) for owner, name, default in names if settings.get(name, ...) == default] == []


def test_the_whole_help_shows_every_setting_with_default_and_description(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    assert main(["serve", "--help", "all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert str(field.description) in text
    assert "--max-batch-size INT" in text and "--media-timeout-seconds SECONDS" in text
    assert "(default: 8000)" in text and "(default: )" not in text and "SecretStr" not in text


@pytest.mark.parametrize("verb", ["serve", "config", "doctor", "models", "chat", "bench", "help"])
def test_the_help_of_a_command_fits_a_screen(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main([verb, "--help"] if verb != "help" else ["help"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") <= 45 and f"trellis {verb if verb != 'help' else 'COMMAND'}" in out


def test_help_on_a_group_a_flag_and_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help", "router"]) == 0
    out = capsys.readouterr().out
    assert "--route-urls URLS" in out and "--port" not in out
    assert main(["help", "serve", "--max_batch_size"]) == 0
    assert "--max-batch-size INT" in capsys.readouterr().out
    assert main(["models", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--cache-dir FOLDER" in out and "--kv-disk-cache-dir" not in out, "a setting's whole name is that setting"
    assert main(["serve", "--help", "nonsense"]) == 2
    assert "no setting has nonsense in its name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-batchsize", "3"], "unknown flag --max-batchsize; did you mean --max-batch-size?"),
        (["serv"], "unknown command serv; did you mean serve?"),
        (["owner/name"], "unknown command owner/name; to serve a model: trellis serve owner/name"),
        (["serve", "a", "--model", "b"], "two models are given: a and --model b"),
        (["bench", "--concurency", "3"], "unknown flag --concurency; did you mean --concurrency?"),
        (["chat", "--port", "9000"], "unknown flag --port; did you mean --url?"),
    ],
)
def test_the_name_that_was_meant_is_suggested(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_flags_are_spelled_as_people_do() -> None:
    assert read_settings(["owner/name"]).model == "owner/name"
    settings = read_settings(["--max_batch_size=3", "--model_path", "a_b", "--api-keys", "x", "--api-keys", "y,z"])
    assert (settings.max_batch_size, settings.model, len(settings.api_keys)) == (3, "a_b", 3)
    switches = read_settings(["--no-docs", "--access-log", "--strict_fields", "false"])
    assert (switches.docs, switches.access_log, switches.strict_fields) == (False, True, False)


def test_lines_of_the_file_that_set_nothing_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    for content in ("PORT=1\n\nAPI_KEYS: secret\n", "PORT=1\n\nAPI_KEYS\n"):
        (tmp_path / ".env").write_text(content)
        assert main(["config"]) == 2
        assert capsys.readouterr().err == "error: line 3 of .env is not NAME=value: write API_KEYS=value\n"
    assert not caplog.records, "the library that reads the file says less"


def test_the_file_is_shared_with_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable of compose.yaml is a setting or left to others; libraries get theirs."""
    names = set(re.findall(r"\$\{(\w+)", (ROOT / "compose.yaml").read_text()))
    assert "HF_TOKEN" in names and "GRAFANA_PASSWORD" in names
    (tmp_path / ".env").write_text("".join(f"{name}=x\n" for name in sorted(names)))
    file = read_env_file(tmp_path / ".env")
    assert file.settings.keys() <= Settings.model_fields.keys()
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("HF_TOKEN=of_file\nCOMPOSE_PROFILES=router\nPORT=1\n")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.delenv("HF_TOKEN")
    assert main(["version"]) == 0
    assert os.environ["HF_TOKEN"] == "of_file" and read_settings([]).port == 1


def test_variables_close_to_a_settings_name_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MAX_BATCHSIZE", "QUANTISATION", "TRELLIS_PORT", "HOSTNAME", "MODELS_FOLDER"):
        monkeypatch.setenv(name, "3")
    found = list(misspelt_variables())
    assert sorted(found) == [
        "the environment variable MAX_BATCHSIZE is no setting; did you mean MAX_BATCH_SIZE?",
        "the environment variable QUANTISATION is no setting; did you mean QUANTIZATION?",
        "the environment variable TRELLIS_PORT is no setting; did you mean PORT?",
    ]
    assert main(["config"]) == 0
    assert sorted(capsys.readouterr().err.splitlines()) == [f"warning: {sentence}" for sentence in sorted(found)]
    texts = [finding.text for finding in check_environment(Settings(host="0.0.0.0"))]
    assert texts == [*found, "HOST=0.0.0.0 without API_KEYS: whoever reaches this machine can use the server"]
    assert list(check_environment(Settings(host="0.0.0.0", api_keys="k")))[len(found) :] == []


def test_config_says_which_layer_set_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("MAX_N=1\nMAX_STOP=1\nAPI_KEYS=secret\n")
    (tmp_path / "args.yaml").write_text("max_batch_size: 11\nkv_cache_config: {tokens_per_block: 64}\n")
    monkeypatch.setenv("MODEL_PATH", "/models/x")
    monkeypatch.setenv("MAX_N", "2")
    flags = ["--max-messages", "3", "--engine", "trtllm", "--extra-engine-args", "args.yaml", "--max-batch-size", "5"]
    assert main(["config", *flags]) == 0
    out = capsys.readouterr().out
    found = dict(line.split("  # ", 1) for line in out.splitlines() if "  # " in line)
    layers = {name.strip(): layer for name, layer in found.items()}
    assert layers["MAX_N=2"] == "environment variable MAX_N"
    assert layers["MODEL=/models/x"] == "environment variable MODEL_PATH"
    assert layers["MAX_STOP=1"] == ".env"
    assert layers["MAX_MESSAGES=3"] == "flag"
    assert layers["PORT=8000"] == "default"
    assert layers["MAX_BATCH_SIZE=11"] == layers["KV_BLOCK_SIZE=64"] == "engine file (EXTRA_ENGINE_ARGS)"
    assert "# HTTP server" in out and "secret" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert f'version = "{capsys.readouterr().out.split()[1]}"' in (ROOT / "pyproject.toml").read_text()


def test_flags_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("MAX_N=1\nMAX_STOP=1\nMAX_MESSAGES=1\n")
    monkeypatch.setenv("MAX_N", "2")
    monkeypatch.setenv("MAX_STOP", "2")
    settings = read_settings(["--max-n", "3"])
    assert (settings.max_n, settings.max_stop, settings.max_messages) == (3, 2, 1)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--max-batch-sizes", "3"], "--max-batch-sizes"),
        (["--max-batch-size=-1"], "--max-batch-size (MAX_BATCH_SIZE)"),
        (["--api-keys", " , "], "--api-keys (API_KEYS)"),
        (["--engine-process", "false", "--api-processes", "2"], "--api-processes (API_PROCESSES)"),
        (["--port", "x"], "--port (PORT): must be a valid integer"),
        (["--engine-hang-seconds", "1"], "--engine-hang-seconds (ENGINE_HANG_SECONDS)"),
        (["--engine", "tensorflow"], "--engine"),
        (["--docs", "perhaps"], "--docs (DOCS)"),
        (["--queue-timeout-seconds", "nan"], "--queue-timeout-seconds"),
        (["--disaggregation-mode", "both"], "--disaggregation-mode (DISAGGREGATION_MODE)"),
        (["--disaggregation-mode", "prefill"], "--internal-secret (INTERNAL_SECRET): the role prefill needs it"),
        (
            ["--disaggregation-mode", "decode", "--internal-secret", "s"],
            "--prefill-urls (PREFILL_URLS): the role decode needs it",
        ),
        (
            ["--prefill-urls", "http://prefill"],
            "--prefill-urls (PREFILL_URLS): each must be http://host:port",
        ),
        (["--prefill-urls", "http://a:1,dns+https://b:2"], "--prefill-urls (PREFILL_URLS): each must be"),
        (
            ["--prefill-urls", "http://a:1/v1"],
            "--prefill-urls (PREFILL_URLS): nothing may follow the port",
        ),
        (
            ["--disaggregation-mode", "encode", "--engine", "trtllm"],
            "--internal-secret (INTERNAL_SECRET): the role encode needs it",
        ),
        (
            ["--disaggregation-mode", "encode", "--internal-secret", "s", "--api-processes", "2"],
            "--api-processes (API_PROCESSES): the role encode has one",
        ),
        (["--encode-urls", "http://encode:8000"], "--internal-secret (INTERNAL_SECRET): ENCODE_URLS needs it"),
        (["--encode-urls", "http://encode"], "--encode-urls (ENCODE_URLS): each must be http://host:port"),
        (["--image-processor-options", "[1]"], "(IMAGE_PROCESSOR_OPTIONS): must be a JSON object"),
        (["--image-processor-options", "{"], "(IMAGE_PROCESSOR_OPTIONS): must be a JSON object"),
        (["--media-allowed-hosts", ","], "--media-allowed-hosts (MEDIA_ALLOWED_HOSTS): names nothing"),
        (["--kv-events-endpoint", "5557"], "(KV_EVENTS_ENDPOINT): must be tcp://*:port"),
        (["--kv-events-endpoint", ""], "--kv-events-endpoint (KV_EVENTS_ENDPOINT)"),
        (
            ["--kv-events-replay-endpoint", "tcp://*:70000"],
            "(KV_EVENTS_REPLAY_ENDPOINT): must be tcp://*:port",
        ),
        (["--visual-engine-args", "[1]"], "(VISUAL_ENGINE_ARGS): must be a JSON object"),
        (
            ["--visual-step-cache", "0.1", "--visual-cfg-batching", "false"],
            "(VISUAL_CFG_BATCHING): false cannot be used with VISUAL_STEP_CACHE",
        ),
        (
            ["--engine", "fake", "--modality", "visual", "--api-processes", "2"],
            "(API_PROCESSES): the role aggregated has one",
        ),
        (
            [
                "--modality",
                "visual",
                "--disaggregation-mode",
                "decode",
                "--internal-secret",
                "s",
                "--prefill-urls",
                "http://a:1",
            ],
            "a model of pictures or videos is aggregated",
        ),
        (["--nats-url", "localhost:4222"], "(NATS_URL): must be nats://host:port"),
        (["--nats-subject", "events.>"], "--nats-subject (NATS_SUBJECT)"),
        (["--otel-endpoint", "collector:4317"], "(OTEL_ENDPOINT): must be http://host:port"),
        (["--watchdog-seconds", "0"], "--watchdog-seconds (WATCHDOG_SECONDS)"),
        (["--threads", "10000"], "--threads (THREADS): 10000 threads would wait for each other on"),
        (["--quantization", "int4"], "--quantization (QUANTIZATION)"),
        (["--quantization", "fp8", "--engine", "trtllm"], "fp8 is for the embedded engine, not for trtllm"),
        (["--compressed-weights", "on", "--engine", "trtllm"], "(COMPRESSED_WEIGHTS): on is for the embedded engine"),
        (["--quantization", "int8", "--engine", "fake"], "int8 is for the embedded engine, not for fake"),
        (
            ["--kv-cache-dtype", "fp8", "--engine", "fake"],
            "(KV_CACHE_DTYPE): fp8 is for the embedded engine, not for fake",
        ),
        (
            ["--enable-test-logits-processor", "1", "--engine", "fake"],
            "--enable-test-logits-processor (ENABLE_TEST_LOGITS_PROCESSOR)",
        ),
    ],
)
def test_wrong_flag_stops_the_start_by_name(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert name in lines[0]


def test_wrong_file_stops_the_start_by_name(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MAX_BATCH=3\nMAX_N=many\nAPI_KEYS=secret\n")
    command = [sys.executable, "-m", "server"]
    run = subprocess.run(command, cwd=tmp_path, env=bare(), capture_output=True, text=True)
    assert run.returncode == 2
    assert sorted(line.split(":")[1].strip() for line in run.stderr.splitlines()) == [
        "--max-n (MAX_N)",
        "unknown setting MAX_BATCH in .env; did you mean MAX_BATCH_SIZE?",
    ]
    assert "secret" not in run.stderr


def test_every_wrong_setting_is_named() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(max_n=0, max_body_mb=0)
    assert [line.partition(":")[0] for line in explain(caught.value)] == [
        "--max-body-mb (MAX_BODY_MB)",
        "--max-n (MAX_N)",
    ]


def test_lists_roles_and_empty_values() -> None:
    settings = Settings(
        api_keys="a, b,", cors_origins="https://x", disaggregation_mode="agg", chat_template="", internal_secret=""
    )
    assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b"]
    assert settings.cors_origins == ("https://x",)
    assert settings.disaggregation_mode == "aggregated"
    assert settings.chat_template is None
    assert settings.internal_secret is None
    assert "a" not in str(settings.api_keys)


def test_the_fake_engine_obeys_the_batch_size_that_is_set() -> None:
    sizes = [
        engine_config(read_settings(["--engine", "fake", *flags]), None) for flags in ([], ["--max-batch-size", "5"])
    ]
    assert [config.max_num_seqs for config in sizes if isinstance(config, FakeConfig)] == [FakeConfig().max_num_seqs, 5]


@pytest.mark.parametrize(
    ("level", "there", "seen"),
    [
        ("debug", None, "VERBOSE"),
        ("warning", None, "WARNING"),
        ("error", None, "ERROR"),
        ("info", "TRACE", "TRACE"),
        ("info", None, "INFO"),
    ],
)
def test_tensorrt_llm_logs_at_our_level_unless_told_otherwise(level: str, there: str | None, seen: str) -> None:
    """As the engine's process finds it: set before anything of TensorRT-LLM is imported there."""
    code = "import os, sys; from server.process import logs; logs.configure(sys.argv[1], 'text');"
    code += "print(os.environ['TLLM_LOG_LEVEL'])"
    variables = bare() if there is None else bare(TLLM_LOG_LEVEL=there)
    run = subprocess.run([sys.executable, "-c", code, level], capture_output=True, text=True, check=True, env=variables)
    assert run.stdout.strip() == seen


def test_the_engines_process_gets_the_level_and_the_defaults_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TLLM_LOG_LEVEL", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("UCX_CUDA_IPC_CACHE", "y")
    with serving("--log-level", "debug") as server:
        environment = server.child("engine.process.host").environ()
    assert environment["TLLM_LOG_LEVEL"] == "VERBOSE" and environment["GOMP_SPINCOUNT"] == "20000"
    assert environment["UCX_CUDA_IPC_CACHE"] == "y", "one that is set stays"


@pytest.mark.parametrize(("engine", "seen"), [("fake", "n"), ("trtllm", None)])
def test_ucx_of_tensorrt_llm_keeps_its_cache(monkeypatch: pytest.MonkeyPatch, engine: str, seen: str | None) -> None:
    """Its transceiver would map the same memory again for each transfer. MPI's workers get what the server has when it
    starts: MPI_Init keeps a copy of the environment for them.
    """
    given: dict[str, str] = {}
    monkeypatch.setattr(cli, "provide", given.setdefault)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(serving_module, "listen", lambda *_: (_ for _ in ()).throw(OSError("enough")))
    assert cli.run(read_settings(["--engine", engine]), [], 0.0) == serving_module.FAILURE
    assert given.get("UCX_CUDA_IPC_CACHE") == seen and given["UCX_WARN_UNUSED_ENV_VARS"] == "n"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().max_n = 3


def test_an_instruction_set_that_the_processor_lacks_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(levels, "_features", frozenset)
    assert main(["--cpu-isa", "avx512", "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: CPU_ISA=avx512 cannot be used: this processor has portable and lacks abm, avx2, "
    )
    assert main(["--cpu-isa", "sse9"]) == 2


def test_config_shows_what_the_model_is_computed_with(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> str:
        assert main(["config", "--device", "cpu", "--cpu-isa", "portable", *arguments]) == 0
        return capsys.readouterr().out.partition("# the embedded engine computes with\n")[2]

    native = "device: cpu\ndtype: float32\ncompute_path: native{}\ninstruction_set: portable\n"
    assert shown("--model", str(tiny_model)) == native.format(", or transformers if bfloat16 would change the weights")
    narrow = tmp_path / "narrow"
    shutil.copytree(tiny_model, narrow)
    save_file(
        {name: tensor.bfloat16() for name, tensor in load_file(tiny_model / "model.safetensors").items()},
        narrow / "model.safetensors",
    )
    assert shown("--model", str(narrow)) == native.format("")
    bfloat16 = shown("--model", str(tiny_model), "--dtype", "bfloat16")
    assert bfloat16.startswith(
        "device: cpu\ndtype: bfloat16\ncompute_path: transformers (dtype bfloat16 and load format auto are not"
    )
    assert shown("--cache-dir", str(tmp_path)).startswith("# known once the model has been fetched or converted")
    monkeypatch.setattr(levels, "_features", frozenset)
    assert main(["config", "--model", str(tiny_model), "--cpu-isa", "avx2"]) == 2
    assert "CPU_ISA=avx2 cannot be used" in capsys.readouterr().err
