"""The folder of results: one line for each measurement, and JSON, CSV and a page made of them.

`measurements.jsonl` is only appended to, so an interrupted sweep goes on where it was.
"""

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from server.bench.summary import Sample
from server.sweep.loads import figures
from server.sweep.plan import Slo

_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for 95 % confidence, two-sided, by degrees of freedom."""
_NORMAL95 = 1.959964
_LINES = "measurements.jsonl"


class Measured(msgspec.Struct, frozen=True, omit_defaults=True):
    """One measurement of a point. `digest` identifies all else that the figures depend on, except the repetition."""

    deployment: str
    length: str
    load: str
    repeat: int
    digest: str
    units: int = 1
    per: str = "replica"
    concurrency: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    requests: list[tuple[float, float, float, int, int, int]] = []
    """Figures of each request: seconds, time to the first token, mean time between tokens; numbers of tokens in the
    prompt, cached, and in the answer."""
    error: str = ""
    """Reason why there are no figures."""
    note: str = ""
    commit: str = ""
    """Commit of the code that measured."""

    @property
    def point(self) -> str:
        return f"{self.deployment} {self.length} {self.load}"

    @property
    def samples(self) -> list[Sample]:
        return [
            Sample(seconds=seconds, ttft=ttft, prompt_tokens=prompt, cached_tokens=cached, completion_tokens=answer)
            for seconds, ttft, _, prompt, cached, answer in self.requests
        ]


def requests_of(samples: Sequence[Sample]) -> list[tuple[float, float, float, int, int, int]]:
    return [
        (round(s.seconds, 6), round(s.ttft, 6), round(s.itl, 7), s.prompt_tokens, s.cached_tokens, s.completion_tokens)
        for s in samples
    ]


@dataclass(frozen=True)
class Estimate:
    """The mean of a figure over repetitions, and half the width of its 95 % confidence interval."""

    mean: float
    half: float
    """Infinite for one repetition."""


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with its interval by Student's t."""
    if len(values) < 2:
        return Estimate(values[0], math.inf)
    return Estimate(fmean(values), _t95(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def _t95(freedom: int) -> float:
    """Return Student's t; beyond the table by its expansion in 1/freedom (Abramowitz and Stegun, 26.7.5)."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _NORMAL95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class PointResult:
    """The figures of a point over its repetitions; without any, `error` says why."""

    deployment: str
    length: str
    load: str
    concurrency: int
    rate: float
    units: int
    per: str
    repeats: int
    figures: dict[str, Estimate] = field(default_factory=dict)
    error: str = ""
    note: str = ""
    pareto: bool = False
    """No other point of this length has more tokens per second both for a user and for a GPU (or replica: these are
    compared among themselves)."""

    def asdict(self) -> dict[str, Any]:
        """Return plain data; what is infinite becomes None."""
        plain = asdict(self)
        for value in plain["figures"].values():
            value["half"] = value["half"] if math.isfinite(value["half"]) else None
        return plain


class ResultFolder:
    """The files of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.records = list(_read(path / _LINES))
        self.about: dict[str, Any] = {}
        """The `about` of an earlier run: its machine, plan and deployments."""
        with suppress(OSError, ValueError, KeyError):
            self.about = json.loads((path / "sweep.json").read_text(encoding="utf-8"))["about"]

    def done(self, digest: str, repeat: int) -> bool:
        """Whether this repetition has been measured; what failed is measured again."""
        return any(record.digest == digest and record.repeat == repeat and not record.error for record in self.records)

    def add(self, record: Measured) -> None:
        """Append a measurement, so that it survives whatever happens next."""
        with (self.path / _LINES).open("ab") as file:
            if file.tell() and not _ends_a_line(self.path / _LINES):
                file.write(b"\n")  # the last line was cut by an interruption
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    def write(self, results: Sequence[PointResult], about: Mapping[str, Any]) -> Path:
        """Write `sweep.json`, `results.csv` and `index.html`, and return the page's path."""
        content = {"about": dict(about), "points": [result.asdict() for result in results]}
        text = json.dumps(content, indent=1, default=str, allow_nan=False)
        write_whole(self.path / "sweep.json", text + "\n")
        write_whole(self.path / "results.csv", table(results))
        page = self.path / "index.html"
        write_whole(page, page_of(content))
        return page


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as read:
        read.seek(-1, os.SEEK_END)
        return read.read() == b"\n"


def _read(file: Path) -> Iterator[Measured]:
    """Yield the measurements of a file, without lines that an interruption has cut."""
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            yield msgspec.json.decode(line, type=Measured)
        except msgspec.MsgspecError:
            continue


def write_whole(file: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def summarised(records: Iterable[Measured], slo: Slo) -> list[PointResult]:
    """Return a result for each point, in the order of their first measurement, with the Pareto frontier marked.

    The last measurement of a repetition counts, so that what failed may be measured again.
    """
    by_point: dict[str, list[Measured]] = {}
    for record in records:
        by_point.setdefault(record.point, []).append(record)
    found = [_summarised(group, slo) for group in by_point.values()]
    frontier = {
        id(result)
        for comparable in {(r.length, r.per) for r in found}
        for result in pareto([r for r in found if (r.length, r.per) == comparable])
    }
    return [replace(result, pareto=id(result) in frontier) for result in found]


def _summarised(group: list[Measured], slo: Slo) -> PointResult:
    last = group[-1]
    current = {record.repeat: record for record in group if record.digest == last.digest}  # the last of each repetition
    good = [record for record in current.values() if not record.error]
    failed = [record for record in current.values() if record.error]
    of_each = [figures(record.samples, record.seconds, record.units, slo) for record in good]
    estimates = {name: estimate([one[name] for one in of_each]) for name in of_each[0]} if of_each else {}
    error = "; ".join(dict.fromkeys(record.error for record in failed))
    notes = dict.fromkeys(record.note for record in good if record.note)
    if len(commits := dict.fromkeys(record.commit for record in good)) > 1:
        notes[f"measured at several commits: {', '.join(commits)}"] = None
    return PointResult(
        last.deployment, last.length, last.load, last.concurrency, last.rate, last.units, last.per, len(good),
        estimates, error, "; ".join(notes),
    )  # fmt: skip


def pareto(results: Iterable[PointResult]) -> list[PointResult]:
    """Return the points that no other one beats in both speeds, the fastest for a user first."""
    measured = [result for result in results if result.figures]
    best: list[PointResult] = []
    for result in sorted(measured, key=lambda r: (-r.figures["per_user"].mean, -r.figures["per_unit"].mean)):
        if not best or result.figures["per_unit"].mean > best[-1].figures["per_unit"].mean:
            best.append(result)
    return best


def table(results: Sequence[PointResult]) -> str:
    """Return the results as CSV: each figure's mean, and half of its 95 % confidence interval."""
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    head = ["deployment", "length", "load", "concurrency", "rate", "units", "per", "repeats", "pareto", "error", "note"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*head, *(column for name in names for column in (name, f"{name}_ci95"))])
    for result in results:
        cells: list[object] = [getattr(result, name) for name in head]
        for name in names:
            value = result.figures.get(name)
            cells += ["", ""] if value is None else [f"{value.mean:.6g}", f"{value.half:.6g}"]
        writer.writerow(cells)
    return out.getvalue()


def page_of(content: Mapping[str, Any]) -> str:
    """Return one self-contained HTML page that shows the content."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    data = json.dumps(content, default=str, allow_nan=False).replace("<", "\\u003c")  # ends no script element
    return template.replace("/*DATA*/null", data, 1)
