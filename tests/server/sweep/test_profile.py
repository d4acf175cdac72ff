"""The smallest deployment that meets targets: what was measured, what is interpolated, what is scaled."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.cli import main
from server.settings import Settings
from server.sweep.plan import Deployment, SweepPlan, read_plan
from server.sweep.profile import Targets, capacities, choose, compose, helm_values, plan_for, predictions, write_files
from server.sweep.results import Estimate, PointResult
from tests.support.servers import ServerThread

TARGETS = Targets(ttft=300, itl=20, isl=100, osl=10)


def plan(*deployments: dict[str, Any]) -> SweepPlan:
    return plan_for(read_plan(None, {"deployments": deployments, "concurrency": [1, 2, 4]}), TARGETS)


def result(
    name: str, streams: int, ttft: float, itl: float, rate: float, *, answer: int = 10, units: int = 1
) -> PointResult:
    figures = {"ttft_p90": ttft, "itl_p90": itl, "requests_per_second": rate}
    return PointResult(
        name, f"100:{answer}", f"c{streams}", streams, 0.0, units, "replica", 3,
        {key: Estimate(value, 0.0) for key, value in figures.items()},
    )  # fmt: skip


ONE = [
    result("one", 1, 100, 10, 1.0), result("one", 2, 200, 16, 1.8), result("one", 4, 250, 24, 3.0),
    result("one", 1, 100, 1, 4.0, answer=2), result("one", 2, 400, 99, 5.0, answer=2),
]  # fmt: skip


def test_the_load_at_which_a_target_is_missed_is_interpolated() -> None:
    """16 ms at 2 streams and 24 at 4: 20 at 3. Prefill has no target between tokens."""
    capacity = capacities(ONE, TARGETS)["one"]
    assert (capacity.requests_per_second, capacity.load) == (1.8, "c2")
    assert capacity.load_predicted == pytest.approx(3.0)
    assert capacity.prefill_tokens_per_second == 400
    misses = capacities([result("slow", 1, 301, 1, 9.0)], TARGETS)["slow"]
    assert (misses.requests_per_second, misses.load_predicted) == (0.0, None)


def test_the_smallest_that_was_measured_wins() -> None:
    small, large = {"name": "one"}, {"name": "two", "replicas": 2}
    results = [*ONE, result("two", 2, 90, 9, 3.4, units=2)]
    found = capacities(results, TARGETS)
    both = plan(large, small)
    choice = choose(both, found, [], TARGETS)
    assert choice is not None and (choice.deployment.name, choice.predicted) == ("one", False)
    more = Targets(300, 20, 100, 10, rate=3.0)
    choice = choose(both, found, predictions(both, found, more), more)
    assert choice is not None and choice.deployment.name == "two" and "measured: 3.4" in choice.why


def test_figures_for_more_replicas_are_marked_as_predictions(tmp_path: Path) -> None:
    more = Targets(300, 20, 100, 10, rate=5.0)
    one = plan({"name": "one", "gpus": 2, "settings": {"max_batch_size": 8}})
    found = capacities(ONE, more)
    predicted = predictions(one, found, more)
    scaled, split = (prediction.deployment for prediction in predicted)
    assert (scaled.replicas, scaled.gpus, split.prefill, split.decode, split.gpus) == (3, 6, 2, 3, 10)
    choice = choose(one, found, predicted, more)
    assert choice is not None and choice.predicted and "predicted, not measured: 5.4" in choice.why
    write_files(tmp_path, one, more, found, predicted, choice)
    said = json.loads((tmp_path / "profile.json").read_text())
    assert said["choice"]["predicted"] and all(entry["predicted"] for entry in said["predictions"])
    assert "predicted, not measured" in (tmp_path / "values.yaml").read_text().partition("\nroles")[0]
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())["roles"]
    assert values["aggregated"] == {"enabled": True, "settings": {"MAX_BATCH_SIZE": 8}, "gpus": 2, "replicas": 3}
    assert values["router"] == {"enabled": True}
    assert choose(one, capacities([], more), [], more) is None


def test_files_are_for_the_services_and_roles_that_exist(tmp_path: Path) -> None:
    services = yaml.safe_load((Path(__file__).resolve().parents[3] / "compose.yaml").read_text())["services"]
    arguments = tmp_path / "engine.yaml"
    arguments.write_text("tensor_parallel_size: 2\nkv_cache_config: {dtype: fp8}\n")
    trtllm = {
        "engine": "trtllm", "model": "m", "extra_engine_args": str(arguments),
        "override_engine_args": {"kv_cache_config": {"dtype": "auto"}},
    }  # fmt: skip
    shapes: list[dict[str, int]] = [
        {}, {"replicas": 2}, {"prefill": 1, "decode": 2}, {"prefill": 1, "decode": 1, "encode": 1},
    ]  # fmt: skip
    for counts in shapes:
        deployment = Deployment(name="it", **counts)
        for settings in ({"max_batch_size": 4}, trtllm):
            found = compose(deployment, settings)["services"]
            assert found.keys() <= services.keys()
            for service in found.values():
                assert {name.lower() for name in service["environment"]} <= Settings.model_fields.keys()
            values = helm_values(deployment, settings)
            enabled = {name: role for name, role in values["roles"].items() if role["enabled"]}
            expected = set(counts) - {"replicas"} or {"aggregated"}
            assert set(enabled) == expected | ({"router"} if "replicas" in counts else set())
            for name in expected & set(counts):
                assert enabled[name]["replicas"] == counts[name]
            if settings is trtllm:
                (role, *_) = enabled.values()
                assert yaml.safe_load(role["engineConfig"]) == {
                    "tensor_parallel_size": 2, "kv_cache_config": {"dtype": "auto"},
                }  # fmt: skip


def test_the_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ServerThread() as server:
        file = tmp_path / "candidates.yaml"
        file.write_text(
            f"concurrency: [1, 2]\nrequests_per_stream: 1\ndeployments: [{{name: it, url: '{server.url}'}}]\n"
        )
        flags = ["--isl", "40", "--osl", "4", "--itl", "60000", "--output", str(tmp_path / "out")]
        assert main(["profile", str(file), "--ttft", "60000", *flags]) == 0
        assert "smallest: it, measured: " in capsys.readouterr().out
        assert main(["profile", str(file), "--ttft", "0.001", *flags]) == 1
        said = capsys.readouterr()
        assert "it, 1 x replica: misses them" in said.out and "no deployment meets the targets" in said.err
    assert json.loads((tmp_path / "out" / "profile.json").read_text())["choice"] is None
