"""One measurement: samples of requests from the built-in client or from aiperf, checked, and their figures."""

import asyncio
import json
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import uvloop

from server.bench.client import LoadRun, Target, fit, run, sampled
from server.bench.summary import Sample, percentile
from server.sweep.plan import Point, Slo, SweepPlan

AIPERF = "aiperf>=0.13,<0.14"
_PROMPT_TOLERANCE = 0.1
"""Fraction by which the mean length of prompts may differ from the requested one."""
_WARM_UP_TOKENS = 8


class MeasurementFailed(Exception):
    """The client could not measure."""


@dataclass(frozen=True)
class Measurement:
    """Samples of all requests, and the seconds from the first request to the last token."""

    samples: Sequence[Sample]
    seconds: float

    def fault(self, point: Point, *, check_prompts: bool) -> str:
        """Return why the answers cannot be used, or "". Prompts of aiperf are not checked: it counts them itself."""
        failed = [sample for sample in self.samples if sample.error]
        if failed:
            return f"{len(failed)} of {len(self.samples)} requests failed: {failed[0].error}"
        if not self.samples:
            return "no request was made"
        if any(sample.completion_tokens != point.length.answer for sample in self.samples):
            counts = sorted({sample.completion_tokens for sample in self.samples})
            return f"answers had {', '.join(map(str, counts))} tokens instead of {point.length.answer}"
        if any(not sample.ttft for sample in self.samples):
            return "an answer had no text"
        mean = sum(sample.prompt_tokens for sample in self.samples) / len(self.samples)
        if check_prompts and abs(mean - point.length.prompt) > max(4, point.length.prompt * _PROMPT_TOLERANCE):
            return f"prompts had {mean:.0f} tokens instead of {point.length.prompt}"
        return ""


def figures(samples: Sequence[Sample], seconds: float, units: int, slo: Slo) -> dict[str, float]:
    """Return the figures of requests that all succeeded. Times are in milliseconds, rates per second.

    `per_user` is the speed of a stream after its first token, `per_unit` the output of a GPU or replica.
    """
    tokens = sum(sample.completion_tokens for sample in samples)
    itls = [sample.itl * 1e3 for sample in samples]
    ttfts = [sample.ttft * 1e3 for sample in samples]
    latencies = [sample.seconds * 1e3 for sample in samples]
    good = sum(meets(sample, slo) for sample in samples)
    return {
        "tokens_per_second": tokens / seconds,
        "per_unit": tokens / seconds / units,
        "per_user": sum(1e3 / itl for itl in itls if itl) / len(itls),
        "requests_per_second": len(samples) / seconds,
        "goodput": good / seconds,
        "good_share": good / len(samples),
        **{
            f"{name}_p{percent}": percentile(values, percent)
            for name, values in (("ttft", ttfts), ("itl", itls), ("latency", latencies))
            for percent in (50, 90, 99)
        },
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples) / len(samples),
        "cached_tokens": sum(sample.cached_tokens for sample in samples) / len(samples),
    }


def meets(sample: Sample, slo: Slo) -> bool:
    return (slo.ttft is None or sample.ttft * 1e3 <= slo.ttft) and (slo.itl is None or sample.itl * 1e3 <= slo.itl)


class LoadClient(Protocol):
    """Loads a server: once to warm it up, then for each measurement."""

    checks_prompts: bool

    def warm_up(self, points: Sequence[Point]) -> None:
        """Send requests to warm up. Raises MeasurementFailed."""
        ...

    def measure(self, point: Point, seed: str, folder: Path) -> Measurement:
        """Measure a point; `folder` may keep the client's files. Raises MeasurementFailed."""
        ...


class BuiltinClient:
    """The client of `trellis bench`."""

    checks_prompts = True

    def __init__(self, plan: SweepPlan, target: Target) -> None:
        self._plan = plan
        self._target = target

    def warm_up(self, points: Sequence[Point]) -> None:
        """Learn how the server counts tokens, then run the largest load once, with short answers."""
        try:
            self._prompts = fit(self._target)
        except RuntimeError as error:
            raise MeasurementFailed(str(error)) from error
        streams = max(point.concurrency or 4 for point in points)
        prompt = max(point.length.prompt for point in points)
        summary = run(self._target, LoadRun(streams, streams, prompt, _WARM_UP_TOKENS), self._prompts, "warm-up")
        if summary.errors == summary.requests:
            raise MeasurementFailed(f"no request of the warm-up succeeded: {summary.first_error}")

    def measure(self, point: Point, seed: str, folder: Path) -> Measurement:
        load = LoadRun(
            point.concurrency or 1,
            self._plan.requests(point),
            point.length.prompt,
            point.length.answer,
            timeout=self._plan.timeout,
            rate=point.rate,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return Measurement(*runner.run(sampled(self._target, load, self._prompts, seed)))


class AiperfClient:
    """NVIDIA's aiperf, in an environment of its own in the cache folder."""

    checks_prompts = False

    def __init__(self, plan: SweepPlan, target: Target, tokenizer: str, cache: Path) -> None:
        self._plan = plan
        self._target = target
        self._tokenizer = tokenizer
        self._command = aiperf_command(cache)

    def warm_up(self, points: Sequence[Point]) -> None:
        """aiperf warms up before each measurement itself."""

    def measure(self, point: Point, seed: str, folder: Path) -> Measurement:
        folder.mkdir(parents=True, exist_ok=True)
        load = (
            ["--request-rate", f"{point.rate:g}", "--arrival-pattern", "poisson"]
            if point.rate
            else ["--concurrency", str(point.concurrency)]
        )
        extra = {**self._target.extra, "min_tokens": point.length.answer}
        options = {
            "--model": self._target.model,
            "--url": self._target.base_url.removesuffix("/v1"),
            "--endpoint-type": "chat",
            "--request-count": str(self._plan.requests(point)),
            "--warmup-request-count": str(point.concurrency or 4),
            "--isl": str(point.length.prompt),
            "--osl": str(point.length.answer),
            "--random-seed": str(zlib.crc32(seed.encode())),
            "--tokenizer": self._tokenizer,
            "--artifact-dir": str(folder),
            "--ui": "none",
            "--request-timeout-seconds": f"{self._plan.timeout:g}",
        }
        command = [self._command, "profile", "--streaming", "--use-server-token-count", *load]
        command += [part for pair in options.items() for part in pair]
        command += [part for name, value in extra.items() for part in ("--extra-inputs", f"{name}:{json.dumps(value)}")]
        if self._target.api_key:
            command += ["--api-key", self._target.api_key]
        records = folder / "profile_export.jsonl"
        records.unlink(missing_ok=True)  # of a measurement that failed
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not records.is_file():
            raise MeasurementFailed(f"aiperf ended with exit code {done.returncode}: {_error_of(folder, done.stdout)}")
        return read_records(records)


def read_records(file: Path) -> Measurement:
    """Return what aiperf recorded of each request. The seconds are those from the first request to the last end."""
    samples: list[Sample] = []
    times: list[tuple[int, int]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        about = record["metadata"]
        if about["benchmark_phase"] != "profiling":
            continue
        times.append((about["request_start_ns"], about["request_end_ns"]))
        samples.append(_sample(record))
    if not times:
        raise MeasurementFailed("aiperf recorded no request")
    seconds = (max(end for _, end in times) - min(start for start, _ in times)) / 1e9
    return Measurement(samples, seconds)


def _sample(record: dict[str, Any]) -> Sample:
    if error := record.get("error"):
        return Sample(error=str(error.get("message") if isinstance(error, dict) else error))
    values = {name: metric["value"] for name, metric in record["metrics"].items()}
    return Sample(
        seconds=values["request_latency"] / 1e3,
        ttft=values.get("time_to_first_token", 0.0) / 1e3,
        prompt_tokens=int(values.get("usage_prompt_tokens", values.get("input_sequence_length", 0))),
        cached_tokens=int(values.get("usage_prompt_cache_read_tokens", 0)),
        completion_tokens=int(values.get("usage_completion_tokens", values.get("output_sequence_length", 0))),
    )


def aiperf_command(cache: Path) -> str:
    """Return the path of aiperf's command. The first time, make an environment for it with pip.

    Raises MeasurementFailed.
    """
    folder = cache / "aiperf-0.13"
    command = folder / "bin" / "aiperf"
    if command.is_file():
        return str(command)
    sys.stderr.write(f"installing {AIPERF} into {folder}; this takes a few minutes\n")
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input", AIPERF],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MeasurementFailed(f"aiperf cannot be installed: {_last_line(done.stderr or done.stdout)}")
    return str(command)


def _error_of(folder: Path, output: str) -> str:
    """Return the first error in aiperf's log, or else the last line of its output."""
    log = folder / "logs" / "aiperf.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line.partition(" - ERROR - ")[2][:400] for line in lines if " - ERROR - " in line), _last_line(output))


def _last_line(text: str) -> str:
    lines = [line.strip(" │╭╰─╮╯") for line in text.splitlines()]
    return next((line[:400] for line in reversed(lines) if line), "no output")
