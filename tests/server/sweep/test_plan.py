"""What a sweep's file may say, and what its mistakes are answered with."""

from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import SettingsError

from server.sweep.deployments import flags_of
from server.sweep.plan import Deployment, Point, read_plan

ONE: dict[str, Any] = {"deployments": [{"name": "one"}], "concurrency": [1, 4]}


def test_a_file_is_read_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("concurrency: [1, 8]\nlengths: ['100:20', {prompt: 5, answer: 6}]\nsettings: {threads: 2}\n")
    given = {"deployments": [{"name": "pd", "prefill": 1, "decode": 2, "settings": {"threads": 1}}], "rate": ["2.5"]}
    plan = read_plan(file, given)
    assert [str(point) for point in plan.points(plan.deployments[0])] == [
        "pd 100:20 c1", "pd 100:20 c8", "pd 100:20 2.5/s", "pd 5:6 c1", "pd 5:6 c8", "pd 5:6 2.5/s",
    ]  # fmt: skip
    assert plan.settings_of(plan.deployments[0]) == {"threads": 1}
    assert plan.deployments[0].units == 3 and plan.deployments[0].model_copy(update={"gpus": 8}).units == 8


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"deployment": []}, "deployment: Extra inputs"), ({"repeats": 2}, "repeats: Input should be greater"),
        ({"concurrency": []}, "give concurrency or rate"), ({"lengths": ["7"]}, "write PROMPT:ANSWER"),
        ({"lengths": ["7:1"]}, "lengths.0.answer"), ({"deployments": [{"name": "a"}] * 2}, "two deployments"),
        ({"deployments": [{"name": "a", "prefill": 1}]}, "need each other"),
        ({"deployments": [{"name": "a", "url": "http://x", "replicas": 2}]}, "give one of url"),
        ({"deployments": [{"name": "a", "url": "http://x", "settings": {"threads": 1}}]}, "takes no settings"),
        ({"deployments": [{"name": "../a"}]}, "deployments.0.name"),
    ],
)  # fmt: skip
def test_mistakes_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_plan(None, {**ONE, **wrong})


def test_a_measurement_is_of_its_settings_and_load() -> None:
    plan = read_plan(None, ONE)
    (first, second) = plan.points(plan.deployments[0])
    assert plan.digest(first) != plan.digest(second)
    assert plan.digest(first) != read_plan(None, {**ONE, "settings": {"threads": 1}}).digest(first)
    assert plan.digest(first) != plan.digest(first, {"model": "another"}), "MODEL=another trellis sweep"
    assert plan.digest(first) == read_plan(None, {**ONE, "repeats": 5, "slo": {"ttft": 1}}).digest(first)
    assert (plan.requests(first), plan.requests(second)) == (4, 16)
    assert plan.requests(Point(first.deployment, first.length, rate=20)) == 80


def test_settings_become_flags() -> None:
    settings = {"engine_process": False, "route_urls": ["a", "b"], "override_engine_args": {"max_batch_size": 1}}
    assert flags_of(settings) == [
        "--engine-process", "false", "--route-urls", "a,b", "--override-engine-args", '{"max_batch_size": 1}',
    ]  # fmt: skip
    assert Deployment(name="a").units == 1
