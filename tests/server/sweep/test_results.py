"""Statistics of repetitions, the frontier, and the files of a sweep."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from server.bench.summary import Sample
from server.sweep.loads import Measurement, MeasurementFailed, figures, read_records
from server.sweep.plan import Deployment, Length, Point, Slo
from server.sweep.results import Measured, ResultFolder, estimate, requests_of, summarised, table

POINT = Point(Deployment(name="one"), Length(prompt=40, answer=11), concurrency=2)


def sample(ttft: float = 0.1, itl: float = 0.01, **fields: Any) -> Sample:
    return Sample(**{"seconds": ttft + 10 * itl, "ttft": ttft, "prompt_tokens": 40, "completion_tokens": 11, **fields})


def record(deployment: str = "one", load: str = "c2", repeat: int = 0, **fields: Any) -> Measured:
    values = {"digest": "d", "seconds": 1.0, "requests": requests_of([sample(), sample(0.3, 0.03)]), **fields}
    return Measured(deployment=deployment, length="40:11", load=load, repeat=repeat, **values)


def test_figures_are_those_of_streams() -> None:
    found = figures([sample(), sample(0.3, 0.03)], 2.0, 4, Slo(ttft=200, itl=50))
    assert found["tokens_per_second"] == 11 and found["per_unit"] == 11 / 4
    assert found["per_user"] == pytest.approx((100 + 1000 / 30) / 2)
    assert (found["goodput"], found["good_share"]) == (0.5, 0.5)
    assert (found["ttft_p50"], found["ttft_p99"]) == pytest.approx((100, 300))
    assert (
        figures([sample()], 1.0, 1, Slo(itl=9))["goodput"] == 0 and figures([sample()], 1.0, 1, Slo())["goodput"] == 1
    )


@pytest.mark.parametrize(
    ("samples", "fault"),
    [
        ([sample()], ""), ([], "no request was made"), ([sample(), sample(error="lost")], "1 of 2 requests failed"),
        ([sample(completion_tokens=9)], "9 tokens instead of 11"), ([sample(ttft=0.0)], "had no text"),
        ([sample(prompt_tokens=50)], "prompts had 50 tokens instead of 40"),
    ],
)  # fmt: skip
def test_answers_are_checked(samples: list[Sample], fault: str) -> None:
    said = Measurement(samples, 1.0).fault(POINT, check_prompts=True)
    assert said == fault if not fault else fault in said


def test_intervals_are_students() -> None:
    """Of 1, 2, 3: s is 1, t of two degrees of freedom 4.303."""
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert estimate([5.0]).half == math.inf
    assert estimate([1.0, 3.0] * 16).half == pytest.approx(2.0395 * 1.016 / 32**0.5, rel=1e-4)
    assert estimate([1.0, 3.0] * 50).half == pytest.approx(1.9842 * 1.00504 / 10, rel=1e-4)


def test_the_frontier_has_what_nothing_beats() -> None:
    """A point is faster for a user with fewer tokens between, and for a replica with fewer seconds in all."""
    fast = {"requests": requests_of([sample(itl=0.005)]), "seconds": 1.0}
    wide = {"requests": requests_of([sample(itl=0.02)]), "seconds": 0.1}
    beaten = {"requests": requests_of([sample(itl=0.02)]), "seconds": 0.5}
    results = summarised(
        [
            record("a", **fast), record("b", **wide), record("c", **beaten), record("d", error="lost"),
            record("e", **beaten, per="GPU"),
        ], Slo()
    )  # fmt: skip
    on_it = {result.deployment: result.pareto for result in results}
    assert on_it == {"a": True, "b": True, "c": False, "d": False, "e": True}, "a GPU is not compared with a replica"


def test_a_folder_resumes_and_what_failed_is_measured_again(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    for one in (record(), record(repeat=1, error="lost"), record("two", error="it ended")):
        folder.add(one)
    with (tmp_path / "measurements.jsonl").open("ab") as file:
        file.write(b'{"deployment": "cut')  # as an interruption leaves it
    again = ResultFolder(tmp_path)
    assert again.done("d", 0) and not again.done("d", 1) and not again.done("other", 0)
    again.add(record(repeat=1))
    assert [one.repeat for one in ResultFolder(tmp_path).records] == [0, 1, 0, 1]
    one, two = summarised(again.records, Slo())
    assert (one.repeats, one.error, two.repeats, two.error) == (2, "", 0, "it ended")


def test_measurements_with_earlier_settings_do_not_count() -> None:
    (result,) = summarised([record(repeat=0), record(repeat=1), record(repeat=0, digest="new")], Slo())
    assert result.repeats == 1


def test_repetitions_at_several_commits_are_noted() -> None:
    (result,) = summarised([record(commit="a"), record(repeat=1, commit="b", note="slow")], Slo())
    assert result.note == "slow; measured at several commits: a, b"


def test_json_csv_and_page_say_the_same(tmp_path: Path) -> None:
    results = summarised(
        [record(), record(repeat=1, seconds=2.0), record("</script>", error="<b>lost</b>")], Slo(ttft=200)
    )
    page = ResultFolder(tmp_path).write(results, {"runs": [{"commit": "abc"}]}).read_text()
    content = json.loads((tmp_path / "sweep.json").read_text())
    first, second = content["points"]
    assert content["about"]["runs"][0]["commit"] == "abc" == ResultFolder(tmp_path).about["runs"][0]["commit"]
    assert (first["figures"]["tokens_per_second"]["mean"], second["error"]) == (16.5, "<b>lost</b>")
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert (rows[0]["tokens_per_second"], rows[1]["error"], rows[1]["tokens_per_second"]) == ("16.5", "<b>lost</b>", "")
    assert float(rows[0]["tokens_per_second_ci95"]) == pytest.approx(
        first["figures"]["tokens_per_second"]["half"], rel=1e-3
    )
    assert page.count("</script>") == 1 and "\\u003c/script>" in page
    assert not any(mark in page for mark in ("http://", "https://", "src=", "@import")), "it needs nothing else"
    assert table([]).startswith("deployment,")


def test_requests_that_aiperf_recorded_are_samples(tmp_path: Path) -> None:
    def line(phase: str, start: int, **more: Any) -> str:
        metrics = {
            "request_latency": 50.0,
            "time_to_first_token": 20.0,
            "usage_prompt_tokens": 41,
            "usage_completion_tokens": 4,
        }
        about = {"benchmark_phase": phase, "request_start_ns": start, "request_end_ns": start + 50_000_000}
        return json.dumps(
            {"metadata": about, "metrics": {name: {"value": value} for name, value in metrics.items()}} | more
        )

    file = tmp_path / "profile_export.jsonl"
    lines = [line("warmup", 0), line("profiling", 10**9), line("profiling", 2 * 10**9, error={"message": "HTTP 503"})]
    file.write_text("\n".join(lines))
    found = read_records(file)
    assert found.seconds == pytest.approx(1.05)
    assert [one.error for one in found.samples] == ["", "HTTP 503"]
    assert found.samples[0].itl == pytest.approx(0.01) and found.samples[0].prompt_tokens == 41
    file.write_text(lines[0])
    with pytest.raises(MeasurementFailed, match="no request"):
        read_records(file)
