"""Configurations of one kind made of another, and their sizes; what is unknown stays."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic_settings import SettingsError

from engine.trtllm.arguments import ArgumentLayer, merge, problems
from server.cli import main
from server.sweep.conversion import engine_arguments, read_values, resized, to_aggregated, to_disaggregated
from server.sweep.plan import Deployment
from server.sweep.profile import helm_values

DISAGGREGATED = """\
# a comment at the head
# of the file
model: /models/m
engine: trtllm
ours: {unknown: [1, null]}
roles:
  aggregated: {enabled: false}
  prefill:
    enabled: true
    replicas: 2
    settings: {LEASE_SECONDS: 20}
    engineConfig: |
      tensor_parallel_size: 2
      disable_overlap_scheduler: true
      cuda_graph_config: null
      cache_transceiver_config: {backend: UCX}
      kv_cache_config: {dtype: fp8, enable_block_reuse: true}
  decode:
    enabled: true
    replicas: 3
    gpus: 4
    unknown: kept
    settings: {PREFILL_ATTEMPTS: 2, MAX_QUEUE_SIZE: 7}
    engineConfig: |
      tensor_parallel_size: 4
      cache_transceiver_config: {backend: UCX}
      kv_cache_config: {dtype: fp8, enable_block_reuse: false}
      unknown_argument: {deep: 1}
  router: {enabled: true}
"""


def arguments(values: dict[str, Any], role: str) -> dict[str, Any]:
    found = engine_arguments(values["roles"][role])
    assert found is not None
    return found


def test_decode_becomes_aggregated_and_keeps_what_is_unknown() -> None:
    before = read_values(DISAGGREGATED)
    values = to_aggregated(before)
    assert before == read_values(DISAGGREGATED), "the original is not changed"
    role = values["roles"]["aggregated"]
    assert (role["replicas"], role["gpus"], role["unknown"], role["enabled"]) == (3, 4, "kept", True)
    assert role["settings"] == {"MAX_QUEUE_SIZE": 7}
    assert arguments(values, "aggregated") == {
        "tensor_parallel_size": 4,
        "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": True},
        "unknown_argument": {"deep": 1},
    }
    assert values["roles"]["prefill"] == values["roles"]["decode"] == {"enabled": False}
    assert values["ours"] == {"unknown": [1, None]} and values["roles"]["router"] == {"enabled": True}


def test_prefill_becomes_aggregated_with_the_overlap_scheduler() -> None:
    found = arguments(to_aggregated(read_values(DISAGGREGATED), "prefill"), "aggregated")
    assert found["disable_overlap_scheduler"] is False and "cache_transceiver_config" not in found
    assert found["cuda_graph_config"] is None and found["kv_cache_config"]["enable_block_reuse"] is True


def test_there_and_back_gives_roles_that_the_engine_takes() -> None:
    values = to_disaggregated(
        to_aggregated(read_values(DISAGGREGATED.replace("unknown_argument: {deep: 1}", ""))), 2, 1
    )
    assert [values["roles"][name].get("replicas") for name in ("prefill", "decode")] == [2, 1]
    for role in ("prefill", "decode"):
        found = arguments(values, role)
        assert problems({"model": "m", **found}) == []
        assert found["cache_transceiver_config"] == {"backend": "DEFAULT"}
        assert found.get("disable_overlap_scheduler", False) == (role == "prefill")
    assert values["roles"]["aggregated"] == {"enabled": False}
    assert to_aggregated(values)["roles"]["aggregated"]["settings"] == {"MAX_QUEUE_SIZE": 7}


def test_sizes_are_set_in_one_role_or_all_and_gpus_follow() -> None:
    sizes = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "kv_cache_config.free_gpu_memory_fraction": 0.7}
    values = resized(read_values(DISAGGREGATED), "decode", sizes)
    assert values["roles"]["decode"]["gpus"] == 16 and "gpus" not in values["roles"]["prefill"]
    assert arguments(values, "decode")["kv_cache_config"] == {
        "dtype": "fp8", "enable_block_reuse": False, "free_gpu_memory_fraction": 0.7,
    }  # fmt: skip
    values = resized(values, None, {"cuda_graph_config.enable_padding": True})
    assert arguments(values, "prefill")["cuda_graph_config"] == {"enable_padding": True}
    assert arguments(values, "prefill")["tensor_parallel_size"] == 2 and values["roles"]["decode"]["gpus"] == 16


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "not YAML"), ("a: 1", "no roles"), ("roles: {prefill: {}}", "no role decode")],
)
def test_values_that_cannot_be_converted_are_named(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        to_aggregated(read_values(text))
    with pytest.raises(SettingsError, match="engine: trtllm"):
        resized({"roles": {"aggregated": {}}}, None, {"tensor_parallel_size": 2})


def test_the_command_prints_values_under_the_comment_at_their_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(DISAGGREGATED)
    flags = ["--to", "aggregated", "--tp", "8", "--set", "kv_cache_config.dtype=auto"]
    assert main(["convert", str(file), *flags]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# a comment at the head\n# of the file\nmodel:") and "engineConfig: |\n" in text
    values = yaml.safe_load(text)
    assert arguments(values, "aggregated")["tensor_parallel_size"] == 8 == values["roles"]["aggregated"]["gpus"]
    assert arguments(values, "aggregated")["kv_cache_config"]["dtype"] == "auto"
    assert main(["convert", str(file), "--set", "novalue"]) == 2
    assert "write NAME=VALUE" in capsys.readouterr().err


def test_the_chart_takes_what_was_converted_and_found() -> None:
    """The shipped example there and back, and the values of `trellis profile`, laid over the chart's defaults."""
    folder = Path(__file__).resolve().parents[3] / "deploy/helm"
    defaults = yaml.safe_load((folder / "trellis/values.yaml").read_text())
    validator = jsonschema.Draft202012Validator(json.loads((folder / "trellis/values.schema.json").read_text()))

    def check(values: dict[str, Any]) -> None:
        validator.validate(merge([ArgumentLayer("chart", defaults), ArgumentLayer("values", values)]).arguments)

    aggregated = to_aggregated(read_values((folder / "values/disaggregated.yaml").read_text()))
    for values in (
        aggregated,
        to_disaggregated(aggregated, 2, 3),
        resized(aggregated, None, {"tensor_parallel_size": 8}),
    ):
        check(values)
    for deployment in (Deployment(name="a", replicas=2), Deployment(name="b", prefill=1, decode=2, encode=1, gpus=8)):
        check(helm_values(deployment, {"max_batch_size": 8, "model": "m"}))
        check(
            helm_values(deployment, {"engine": "trtllm", "model": "m", "override_engine_args": {"max_batch_size": 8}})
        )
