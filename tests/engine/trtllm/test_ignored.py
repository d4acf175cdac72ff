"""Arguments that have no effect.

Those that AutoDeploy, an encoder or this server does not take are left out, shown and warned of.
"""

import json
import logging
from pathlib import Path

import pytest

from engine.config import TrtllmConfig, TrtllmEncoderConfig
from engine.errors import EngineFailure
from engine.trtllm import library, versions
from engine.trtllm.arguments import AUTODEPLOY_REFUSES, ENCODER_TAKES
from server.cli import main
from server.compose.config import engine_config
from server.compose.engine_args import effective
from server.settings import EngineArgsError, read_settings
from tests.support.trtllm import NEWEST, model_folder, stand_in

CONTRACT = json.loads((Path(__file__).resolve().parents[2] / "contract" / "trtllm_api.json").read_text())


@pytest.fixture
def extra(tmp_path: Path) -> Path:
    path = tmp_path / "extra.yaml"
    path.write_text("kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8}\nmax_batch_size: 64\n")
    return path


def test_autodeploy_gets_its_own_arguments_and_none_that_it_refuses(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """`config` shows what is left, and the start says of each of the others that it is ignored."""
    flags = [
        "--engine",
        "trtllm",
        "--backend",
        "_autodeploy",
        "--tensor-parallel-size",
        "2",
        "--override-engine-args",
        '{"world_size": 2}',
    ]
    with caplog.at_level(logging.WARNING):
        config = engine_config(read_settings(flags), Path("folder"))
    assert isinstance(config, TrtllmConfig) and config.backend == "_autodeploy"
    assert config.arguments["world_size"] == 2 and not config.arguments.keys() & set(AUTODEPLOY_REFUSES)
    reason = "AutoDeploy does not take it"
    assert [record.args for record in caplog.records] == [
        ("scheduler_config", reason),
        ("tensor_parallel_size", reason),
    ]
    assert main(["config", *flags]) == 0
    shown = capsys.readouterr().out
    assert f"# tensor_parallel_size is ignored: {reason}\n" in shown and "scheduler_config.capacity" not in shown
    assert set(CONTRACT["models"]["auto_deploy.LlmArgs"]["forbidden_non_default"]) <= set(AUTODEPLOY_REFUSES)


def test_workers_that_would_make_the_text_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the file says a number or a quoted one: their results have text in the place of tokens."""
    override = '{"num_postprocess_workers": "2", "postprocess_tokenizer_dir": "/models/x"}'
    with caplog.at_level(logging.WARNING):
        config = engine_config(
            read_settings(["--engine", "trtllm", "--override-engine-args", override]), Path("folder")
        )
    assert isinstance(config, TrtllmConfig) and not [name for name in config.arguments if "postprocess" in name]
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        "num_postprocess_workers", "postprocess_tokenizer_dir",
    ]  # fmt: skip


def test_an_encoder_takes_few_arguments_and_one_request(
    extra: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    flags = [
        "--engine",
        "trtllm",
        "--disaggregation-mode",
        "encode",
        "--publish-kv-events",
        "true",
        "--dtype",
        "float16",
    ]
    assert effective(read_settings(flags)).arguments == {"max_batch_size": 1, "dtype": "float16"}
    flags += [
        "--tensor-parallel-size",
        "2",
        "--max-num-tokens",
        "32768",
        "--trust-remote-code",
        "true",
        "--extra-engine-args",
        str(extra),
    ]
    assert main(["config", *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-7:] == [
        "# arguments of tensorrt_llm.llmapi.MultimodalEncoder",
        'dtype: "float16"  # setting',
        "max_batch_size: 64  # EXTRA_ENGINE_ARGS",
        "max_num_tokens: 32768  # setting",
        "tensor_parallel_size: 2  # setting",
        "trust_remote_code: true  # setting",
        "# kv_cache_config is ignored: an encoder does not take it",
    ]
    with caplog.at_level(logging.WARNING):
        config = engine_config(read_settings(flags), Path("folder"))
    assert isinstance(config, TrtllmEncoderConfig) and "kv_cache_config" not in config.arguments
    assert [record.args for record in caplog.records] == [("kv_cache_config", "an encoder does not take it")]
    signature = CONTRACT["callables"]["tensorrt_llm.llmapi.MultimodalEncoder.__init__"]["params"]
    named = {parameter["name"] for parameter in signature} - {"self", "model", "kwargs"}
    assert named == set(ENCODER_TAKES) - {"max_batch_size", "max_num_tokens"}, (
        "which are two of the keywords that 1.2.1 passes on"
    )


def test_an_encoder_refuses_other_types_of_numbers() -> None:
    flags = ["--engine", "trtllm", "--override-engine-args", '{"dtype": "fp8"}']
    assert effective(read_settings(flags)).arguments["dtype"] == "fp8"
    with pytest.raises(EngineArgsError, match="OVERRIDE_ENGINE_ARGS: dtype: an encoder takes auto, float16"):
        effective(read_settings([*flags, "--disaggregation-mode", "encode"]))


NEWER = [
    "--engine",
    "trtllm",
    "--override-engine-args",
    '{"kv_cache_config": {"use_kv_cache_manager_v2": true}, "scheduler_config": {"waiting_queue_policy": "FCFS"}}',
]


def test_keys_of_another_version_are_left_to_the_package_that_knows_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(EngineArgsError, match=r"kv_cache_config\.use_kv_cache_manager_v2"):
        effective(read_settings(NEWER))
    monkeypatch.setattr(versions.metadata, "version", lambda name: NEWEST)
    arguments = effective(read_settings(NEWER)).arguments
    model_folder(tmp_path)
    with stand_in(NEWEST):
        with library.load(TrtllmConfig(model=str(tmp_path), arguments=arguments)) as llm:
            assert llm.args.kv_cache_config.use_kv_cache_manager_v2
        wrong = {**arguments, "scheduler_config": {"no_such_key": 1}}
        with pytest.raises(EngineFailure, match="no_such_key"):
            library.load(TrtllmConfig(model=str(tmp_path), arguments=wrong))
    with stand_in(), pytest.raises(EngineFailure, match="use_kv_cache_manager_v2"):
        library.load(TrtllmConfig(model=str(tmp_path), arguments=arguments))


@pytest.mark.parametrize("version", ["1.2.0", "1.2.1.post1"])
def test_other_1_2_releases_are_checked_as_1_2_1(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: version)
    with pytest.raises(EngineArgsError, match=r"kv_cache_config\.use_kv_cache_manager_v2"):
        effective(read_settings(NEWER))
