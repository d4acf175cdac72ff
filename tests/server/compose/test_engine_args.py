"""Arguments of TensorRT-LLM's `LLM`: our models of them against the contract, the layers, and what is refused before a
GPU is needed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from engine.checkpoints.packaged import HEADS
from engine.trtllm import llm_args
from engine.trtllm.arguments import (
    EVENT_BUFFER_SIZE,
    KV_TRANSFER_TIMEOUT_MS,
    ArgumentLayer,
    attention_dp_size,
    defaults,
    forced,
    gpus_per_replica,
    merge,
    problems,
)
from server.cli import main
from server.compose.engine_args import effective
from server.compose.model import draft_folder
from server.roles import ROLES
from server.settings import EngineArgsError, read_settings

CONTRACT = json.loads((Path(__file__).resolve().parents[2] / "contract" / "trtllm_api.json").read_text())
MODELS = CONTRACT["models"] | {"LoraConfig": CONTRACT["dataclasses"]["LoraConfig"]}
OURS = {name: cls for name, cls in llm_args.MODELS.items() if name in MODELS}
LEFT_OUT = {"mpi_session"}
SPELLED = {"LoadFormat.AUTO": "auto", "SamplerType.auto": "auto"}


def test_every_model_that_a_start_can_use_is_known() -> None:
    elsewhere = (
        "serve.",
        "newer-only",
        "auto_deploy.",
        "Medusa",
        "Lookahead",
        "GuidedDecodingConfig",
        "ExtendedRuntime",
        "MoeLoadBalancer",
    )
    assert {name for name in MODELS if not name.startswith(elsewhere)} == OURS.keys()


@pytest.mark.parametrize("name", OURS)
def test_names_order_and_defaults_are_those_of_the_contract(name: str) -> None:
    model: type[BaseModel] = OURS[name]
    fields = {field: facts for field, facts in MODELS[name]["fields"].items() if field not in LEFT_OUT}
    own = [field for field in model.__annotations__ if field in model.model_fields]
    tags = {"decoding_type", "algorithm"}
    if name == "BaseLlmArgs":
        fields.pop("load_format")  # TorchLlmArgs says it anew
    assert [field for field in own if field not in tags] == list(fields)
    for field, facts in fields.items():
        info = model.model_fields[field]
        assert info.is_required() == bool(facts.get("required")), field
        if "default" in facts:
            assert info.default == SPELLED.get(facts["default"], facts["default"]), field


def test_the_defaults_are_valid_and_unknown_names_are_not() -> None:
    assert problems(defaults(0.9)) == []
    assert problems({"kv_cache_config": {"free_gpu_memory_fractoin": 0.5}}) == [
        "kv_cache_config.free_gpu_memory_fractoin: TensorRT-LLM 1.2.1 has no such argument"
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"moe_config": {"backend": "AUTO"}}, "moe_config.backend"),
        ({"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3}}, "speculative_config"),
        ({"speculative_config": {"decoding_type": "Eagle"}}, "speculative_config.max_draft_len"),
        (
            {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}},
            "speculative_config.max_matching_ngram_size",
        ),
        (
            {"scheduler_config": {"dynamic_batch_config": {"enable_batch_size_tuning": True}}},
            "scheduler_config.dynamic_batch_config",
        ),
        ({"scheduler_config": {"waiting_queue_policy": "FCFS"}}, "scheduler_config.waiting_queue_policy"),
        ({"kv_cache_config": {"use_kv_cache_manager_v2": True}}, "kv_cache_config.use_kv_cache_manager_v2"),
        ({"cuda_graph_config": {"batch_sizes": [1, 2], "max_batch_size": 4}}, "cuda_graph_config.max_batch_size"),
        ({"gpus_per_node": 0}, "gpus_per_node"),
        (
            {"kv_cache_config": {"event_buffer_max_size": 1, "enable_block_reuse": False}},
            "kv_cache_config.event_buffer_max_size",
        ),
        (
            {"kv_cache_config": {"host_cache_size": 1 << 30, "enable_block_reuse": False}},
            "kv_cache_config.host_cache_size",
        ),
        (
            {"kv_cache_config": {"secondary_offload_min_priority": 35}},
            "kv_cache_config.secondary_offload_min_priority",
        ),
        (
            {"kv_cache_config": {"host_cache_size": 1, "secondary_offload_min_priority": 101}},
            "kv_cache_config.secondary_offload_min_priority",
        ),
        ({"kv_connector_config": {"connector_module": "lmcache"}}, "kv_connector_config"),
        (
            {
                "kv_connector_config": {
                    "connector_module": "m",
                    "connector_scheduler_class": "S",
                    "connector_worker_class": "W",
                },
                "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
            },
            "kv_connector_config",
        ),
        ({"tensor_parallel_size": "many"}, "tensor_parallel_size"),
        ({"cache_transceiver_config": {"backend": "TCP"}}, "cache_transceiver_config.backend"),
        ({"model_kwargs": {}}, "model_kwargs"),
    ],
)
def test_arguments_that_1_2_1_refuses_are_named(arguments: dict[str, Any], named: str) -> None:
    found = problems(arguments)
    assert found and all(line.startswith(named) for line in found)


trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(mappings, max_size=4))
def test_layers_merge_deeply_and_the_last_one_wins(layers: list[dict[str, Any]]) -> None:
    before = json.dumps(layers)
    found = merge([ArgumentLayer(str(index), values) for index, values in enumerate(layers)])
    assert json.dumps(layers) == before, "layers are not changed"
    expected: dict[str, Any] = {}
    for values in layers:
        expected = updated(expected, values)
    assert found.arguments == expected
    assert found.origins.keys() == set(leaves(expected))
    for path, origin in found.origins.items():
        said = [index for index, values in enumerate(layers) if path in set(leaves(values))]
        assert int(origin) in said


def updated(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The plain definition of a deep merge; an empty mapping replaces what is no mapping, and adds nothing to one that
    is.
    """
    out = dict(old)
    for name, value in new.items():
        if isinstance(value, dict) and (value or isinstance(old.get(name), dict)):
            out[name] = updated(old[name] if isinstance(old.get(name), dict) else {}, value)
        else:
            out[name] = value
    return out


def leaves(tree: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        found += leaves(value, f"{path}{name}.") if isinstance(value, dict) and value else [f"{path}{name}"]
    return found


def test_roles_and_publishing_have_the_last_word() -> None:
    assert [layer.values for layer in forced({}, publish_kv_events=False)] == []
    publishing = merge(list(forced({"backend": "_autodeploy"}, publish_kv_events=True))).arguments
    assert (
        publishing["kv_cache_config"] == {"event_buffer_max_size": EVENT_BUFFER_SIZE}
        and publishing["backend"] == "pytorch"
    )
    kept = merge(list(forced({"kv_cache_config": {"event_buffer_max_size": 7}}, publish_kv_events=True))).arguments
    assert "kv_cache_config" not in kept
    prefill = merge(list(forced({}, role_arguments=ROLES["prefill"].trtllm_arguments, moves_kv_blocks=True))).arguments
    transceiver = {"backend": "DEFAULT", "kv_transfer_timeout_ms": KV_TRANSFER_TIMEOUT_MS}
    assert prefill == {"cache_transceiver_config": transceiver, "disable_overlap_scheduler": True}


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({"backend": "UCX"}, {"kv_transfer_timeout_ms": KV_TRANSFER_TIMEOUT_MS}),
        ({"backend": "UCX", "kv_transfer_timeout_ms": 5}, None),
        ({"backend": "UCX", "kv_transfer_timeout_ms": None}, None),
        ({"kv_transfer_timeout_ms": 5}, {"backend": "DEFAULT"}),
    ],
)
def test_transceiver_settings_of_a_layer_override_the_roles_defaults(
    said: dict[str, Any], added: dict[str, Any] | None
) -> None:
    decode = merge(list(forced({"cache_transceiver_config": said}, moves_kv_blocks=True))).arguments
    assert decode == ({} if added is None else {"cache_transceiver_config": added})


def test_a_transceiver_that_is_no_mapping_is_named() -> None:
    flags = [
        "--engine",
        "trtllm",
        "--disaggregation-mode",
        "decode",
        "--override-engine-args",
        '{"cache_transceiver_config": "UCX"}',
    ]
    with pytest.raises(EngineArgsError, match="OVERRIDE_ENGINE_ARGS: cache_transceiver_config"):
        effective(read_settings(flags))


def test_sizes() -> None:
    arguments = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "context_parallel_size": None}
    assert gpus_per_replica(arguments) == 8
    assert [attention_dp_size({**arguments, "enable_attention_dp": on}) for on in (False, True)] == [1, 4]


@pytest.fixture
def extra(tmp_path: Path) -> Path:
    path = tmp_path / "extra.yaml"
    path.write_text("kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8}\nmax_batch_size: 64\n")
    return path


def test_each_layer_overrides_the_one_before(extra: Path) -> None:
    override = json.dumps({"kv_cache_config": {"free_gpu_memory_fraction": 0.7}})
    flags = ["--engine", "trtllm", "--max-batch-size", "16", "--kv-block-size", "64", "--expert-parallel-size", "8"]
    found = effective(read_settings([*flags, "--extra-engine-args", str(extra), "--override-engine-args", override]))
    cache = found.arguments["kv_cache_config"]
    assert cache == {"dtype": "fp8", "free_gpu_memory_fraction": 0.7, "tokens_per_block": 64}
    assert (found.arguments["max_batch_size"], found.arguments["moe_expert_parallel_size"]) == (64, 8)
    assert "max_num_tokens" not in found.arguments, "what nobody set is the engine's own to choose"
    assert found.origins["kv_cache_config.free_gpu_memory_fraction"] == "OVERRIDE_ENGINE_ARGS"
    assert found.origins["max_batch_size"] == "EXTRA_ENGINE_ARGS"
    assert found.origins["kv_cache_config.tokens_per_block"] == "setting"
    assert found.origins["guided_decoding_backend"] == "default"


@pytest.mark.parametrize(("flags", "layer"), [([], "default"), (["--free-gpu-memory-fraction", "0.9"], "setting")])
def test_a_fraction_that_was_set_is_a_setting_also_at_its_default(flags: list[str], layer: str) -> None:
    found = effective(read_settings(["--engine", "trtllm", *flags]))
    assert found.arguments["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9}
    assert found.origins["kv_cache_config.free_gpu_memory_fraction"] == layer


def test_config_shows_what_a_role_forces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--engine", "trtllm", "--disaggregation-mode", "prefill"]) == 0
    shown = capsys.readouterr().out
    assert (
        "DISAGGREGATION_MODE=prefill # flag" in " ".join(shown.split()) and "# arguments of tensorrt_llm.LLM\n" in shown
    )
    assert (
        "disable_overlap_scheduler: true  # role\n" in shown
        and 'cache_transceiver_config.backend: "DEFAULT"  # role\n' in shown
    )
    assert f"cache_transceiver_config.kv_transfer_timeout_ms: {KV_TRANSFER_TIMEOUT_MS}  # role\n" in shown


def test_settings_of_all_engines_reach_this_one_too() -> None:
    found = effective(read_settings(["--engine", "trtllm", "--load-format", "dummy", "--enable-cuda-graphs", "false"]))
    assert found.arguments["load_format"] == "dummy" and found.arguments["cuda_graph_config"] is None
    assert {"load_format", "cuda_graph_config"} & effective(
        read_settings(["--engine", "trtllm"])
    ).arguments.keys() == set()


def test_the_host_cache_is_a_setting_that_files_override(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--engine", "trtllm", "--kv-host-cache-mb", "2048", "--secondary-offload-min-priority", "10"]
    cache = effective(read_settings(flags)).arguments["kv_cache_config"]
    assert (cache["host_cache_size"], cache["secondary_offload_min_priority"]) == (2 << 30, 10)
    assert (
        main(["config", *flags, "--override-engine-args", '{"kv_cache_config": {"host_cache_size": 1073741824}}']) == 0
    )
    out = capsys.readouterr().out
    assert "KV_HOST_CACHE_MB=1024 " in out and "kv_cache_config.host_cache_size: 1073741824" in out


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--override-engine-args", "{"], "OVERRIDE_ENGINE_ARGS: not valid JSON"),
        (["--override-engine-args", "[1]"], "OVERRIDE_ENGINE_ARGS: must be a mapping"),
        (["--override-engine-args", '{"model": "x"}'], "OVERRIDE_ENGINE_ARGS: model is a setting of its own, MODEL"),
        (
            ["--override-engine-args", '{"frob": 1}'],
            "OVERRIDE_ENGINE_ARGS: frob: TensorRT-LLM 1.2.1 has no such argument",
        ),
        (["--extra-engine-args", "/no/such.yaml"], "EXTRA_ENGINE_ARGS: /no/such.yaml"),
    ],
)
def test_wrong_arguments_stop_the_start_by_name(
    flags: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EngineArgsError):
        effective(read_settings(["--engine", "trtllm", *flags]))
    for command in ([], ["config"]):
        assert main([*command, "--engine", "trtllm", *flags]) == 2
        assert capsys.readouterr().err.startswith(f"error: {fault}")


def test_an_empty_file_says_nothing_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text("# nothing\n")
    assert effective(read_settings(["--engine", "trtllm", "--extra-engine-args", str(path)])).arguments
    path.write_text("a: [")
    with pytest.raises(EngineArgsError, match="EXTRA_ENGINE_ARGS"):
        effective(read_settings(["--engine", "trtllm", "--extra-engine-args", str(path)]))


def test_config_shows_settings_arguments_and_layers_but_no_secret(
    extra: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--engine",
        "trtllm",
        "--extra-engine-args",
        str(extra),
        "--api-keys",
        "swordfish",
        "--publish-kv-events",
        "true",
    ]
    assert main(["config", *flags]) == 0
    shown = capsys.readouterr().out
    assert "swordfish" not in shown
    words = " ".join(shown.split())
    assert "PORT=8000 # default" in words and "ENGINE=trtllm # flag" in words
    assert 'kv_cache_config.dtype: "fp8"  # EXTRA_ENGINE_ARGS\n' in shown
    assert f"kv_cache_config.event_buffer_max_size: {EVENT_BUFFER_SIZE}  # publishing\n" in shown
    assert main(["config"]) == 0
    assert "tensorrt_llm" not in capsys.readouterr().out


def test_speculation_is_tensorrt_llms_own_or_refused() -> None:
    def arguments(*flags: str) -> dict[str, Any]:
        return effective(read_settings(["--engine", "trtllm", *flags])).arguments

    assert "speculative_config" not in arguments()
    assert arguments("--speculative", "ngram")["speculative_config"] == {
        "decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2,
    }  # fmt: skip
    draft = ("--speculative", "draft", "--speculative-model", "/small", "--speculative-tokens", "3")
    assert arguments(*draft)["speculative_config"] == {
        "decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model": "/small",
    }  # fmt: skip
    override = json.dumps({"speculative_config": {"max_draft_len": 7}})
    flags = ("--speculative", "ngram", "--override-engine-args", override)
    assert arguments(*flags)["speculative_config"]["max_draft_len"] == 7
    with pytest.raises(EngineArgsError, match="SPECULATIVE_MIN_SPEEDUP: TensorRT-LLM's speculation has no such"):
        arguments("--speculative", "ngram", "--speculative-min-speedup", "1.5")
    with pytest.raises(ValidationError, match="is not for TensorRT-LLM: take ngram or draft"):
        arguments("--speculative", "suffix")
    with pytest.raises(ValidationError, match="is not for TensorRT-LLM: take ngram or draft"):
        arguments("--speculative", "eagle3")


@pytest.mark.parametrize("model", HEADS)
def test_models_with_heads_of_their_own_need_no_other(model: str) -> None:
    folder = draft_folder(read_settings(["--model", model, "--speculative", "eagle3"]))
    assert folder is not None and folder.name == model and (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--engine", "fake", "--speculative", "ngram"], "the fake engine does not speculate"),
        (["--speculative", "draft"], "SPECULATIVE=draft needs a draft model"),
        (["--speculative", "eagle3", "--model", "x"], "SPECULATIVE=eagle3 needs an EAGLE-3 head for x; smollm2"),
        (["--speculative", "ngram", "--speculative-model", "x"], "is for SPECULATIVE=draft"),
    ],
)
def test_settings_of_speculation_that_cannot_be_kept_stop_the_start(flags: list[str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        read_settings(flags)


@pytest.mark.parametrize(
    ("flags", "publishes"), [(["--dynamo"], True), (["--dynamo", "--dynamo-kv-events", "false"], False), ([], False)]
)
def test_a_dynamo_graph_needs_the_engines_events(flags: list[str], publishes: bool) -> None:
    found = effective(read_settings(["--engine", "trtllm", *flags]))
    assert ("event_buffer_max_size" in found.arguments.get("kv_cache_config", {})) == publishes
