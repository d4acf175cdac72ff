"""The shipped engine configurations.

Their arguments are ones that TensorRT-LLM 1.2.1 takes, and prefill and decode files fit each other.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.trtllm.arguments import problems
from server.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "deploy/engine_configs"
BALANCER = "deepseek_r1/eplb.yaml"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
GUIDE = (FOLDER.parent.parent / "docs/tensorrt-llm.md").read_text(encoding="utf-8")
NOT_OURS = {"CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_TOKEN", "TLLM_LOG_LEVEL", "UCX_CUDA_IPC_CACHE"}
MOUNT = "/config/"  # where the README mounts the folder
DEEPSEEK_R1_EXPERTS = 256


def load(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict), "an empty file fails in TensorRT-LLM"
    return loaded


NAMES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml"))
ENGINES = [name for name in NAMES if name != BALANCER]
PREFILL = [name for name in ENGINES if name.endswith("prefill.yaml")]
DECODE = [name for name in ENGINES if name.endswith("decode.yaml")]
WIDE = [name for name in ENGINES if "wide_ep" in name]
PAIRS = [(name, name.replace("prefill", "decode")) for name in PREFILL]


def test_the_promised_files_are_here() -> None:
    folders = {name.split("/")[0] for name in ENGINES}
    assert folders == {"deepseek_r1", "gemma3", "gpt_oss_120b", "llama4", "llava", "qwen3"}
    assert {decode for _, decode in PAIRS} == set(DECODE)
    assert len(PAIRS) == 4


@pytest.mark.parametrize("name", ENGINES)
def test_arguments_are_valid(name: str) -> None:
    assert problems({"model": "some/model", **load(name)}) == []


@pytest.mark.parametrize("name", ENGINES)
def test_numbers_fit_each_other(name: str) -> None:
    arguments = load(name)
    graphs = arguments.get("cuda_graph_config")
    if graphs:
        assert graphs["batch_sizes"] == sorted(set(graphs["batch_sizes"]))
        assert graphs["batch_sizes"][-1] == arguments["max_batch_size"], "the largest batch runs as a graph"
    assert arguments["tensor_parallel_size"] % arguments.get("moe_expert_parallel_size", 1) == 0
    draft = arguments.get("speculative_config", {}).get("num_nextn_predict_layers", 0)
    assert arguments["max_num_tokens"] >= arguments["max_batch_size"] * (1 + draft), "a step decodes every sequence"
    if not arguments.get("enable_chunked_prefill") and "max_seq_len" in arguments and name not in DECODE:
        assert arguments["max_num_tokens"] >= arguments["max_seq_len"], "a prompt larger than a step is refused"


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_prefill_and_decode_fit(prefill: str, decode: str) -> None:
    first, second = load(prefill), load(decode)
    for key in ("dtype", "tokens_per_block"):
        assert first["kv_cache_config"][key] == second["kv_cache_config"][key]
    assert first["cache_transceiver_config"] == second["cache_transceiver_config"]
    assert first["cache_transceiver_config"]["backend"] is not None
    assert first["cache_transceiver_config"]["max_tokens_in_buffer"] >= first["max_seq_len"], (
        "the longest prompt can be sent"
    )
    assert first["disable_overlap_scheduler"] is True
    assert second.get("disable_overlap_scheduler", False) is False
    assert second["max_seq_len"] >= first["max_seq_len"], "what was prefilled can go on"
    assert first.get("speculative_config") == second.get("speculative_config")


@pytest.mark.parametrize("name", WIDE)
def test_wide_expert_parallelism_has_a_load_balancer(name: str) -> None:
    arguments = load(name)
    assert arguments["enable_attention_dp"] is True
    assert arguments["moe_config"]["backend"] == "WIDEEP"
    assert arguments["moe_config"]["load_balancer"] == MOUNT + BALANCER
    assert arguments["moe_config"]["max_num_tokens"] == arguments["max_num_tokens"] * arguments["tensor_parallel_size"]
    balancer = load(BALANCER)
    assert balancer.keys() <= {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}
    assert balancer["num_slots"] >= DEEPSEEK_R1_EXPERTS
    assert balancer["num_slots"] % arguments["moe_expert_parallel_size"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_speaks_of_every_file(name: str) -> None:
    assert f"`{name}`" in README


def test_a_wrong_file_would_be_noticed() -> None:
    """The checks above can fail: each of these mistakes is one of 1.2.1's documented gotchas."""
    for wrong in (
        {"moe_config": {"backend": "AUTO"}},
        {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3}},
        {"kv_cache_config": {"use_kv_cache_manager_v2": True}},
        {"scheduler_config": {"dynamic_batch_config": {"enable_batch_size_tuning": True}}},
        {"model_kwargs": {}},
    ):
        assert problems({"model": "some/model", **wrong}) != []


def test_the_documents_name_settings_that_exist() -> None:
    variables = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", README + GUIDE)) - NOT_OURS
    flags = set(
        re.findall(r"(?<=--)(?:extra-engine|override-engine|disaggregation|engine-on|gpus-per)[a-z-]+", README + GUIDE)
    )
    assert len(variables) > 10
    assert len(flags) == 5
    assert {name.lower() for name in variables} | {
        flag.replace("-", "_") for flag in flags
    } <= Settings.model_fields.keys()


def test_the_documents_name_arguments_that_exist() -> None:
    text = README + GUIDE.partition("## 1.2.1 and others")[0]
    named = set(re.findall(r"`(\w+_config)\.(\w+)", text))
    assert len(named) > 10
    unknown = [
        (outer, inner) for outer, inner in named if "no such argument" in " ".join(problems({outer: {inner: None}}))
    ]
    assert unknown == []
