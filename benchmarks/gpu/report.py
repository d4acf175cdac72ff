"""Write the tables of a GPU run, and its measurements as JSON."""

import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.gpu.cells import (
    GREEDY_SHARE,
    HTTP_SHARE,
    READY_SECONDS,
    ROUNDS,
    VLLM,
    VLLM_READY_SECONDS,
    WORKLOADS,
    Workload,
)
from benchmarks.report import save, table
from server.bench.machine import describe_machine
from server.bench.summary import Summary

if TYPE_CHECKING:
    from benchmarks.gpu.check import Agreement

Runs = dict[str, list[Summary]]
"""Summaries by workload, one per repetition."""


@dataclass(slots=True)
class GpuReport:
    """Results of a run. `anchored` means that the reference figures apply to this model and machine, `fp8` that its
    weights and its cache have eight bits."""

    label: str
    settings: dict[str, object]
    anchored: bool
    fp8: bool = False
    starts: list[tuple[float, float]] = field(default_factory=list)
    """Seconds until ready, and until the first token."""
    first: dict[str, Summary] = field(default_factory=dict)
    """The first run of greedy workloads after the start, over HTTP."""
    http: Runs = field(default_factory=dict)
    in_process: Runs = field(default_factory=dict)
    agreements: list["Agreement"] = field(default_factory=list)
    machine: dict[str, object] = field(default_factory=lambda: describe_gpu() | describe_machine())

    def facts(self) -> dict[str, object]:
        return {**self.machine, **self.settings}

    def markdown(self) -> str:
        facts = "\n".join(f"- {key}: {value}" for key, value in self.facts().items())
        parts = [
            f"# GPU benchmark: {self.label}",
            facts,
            self._workloads(),
            self._starts(),
            self._first_runs(),
            self._agreements(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, folder: Path) -> Path:
        """Write the .json and the .md file; return the path of the latter."""
        return save(folder, self.label, self.markdown(), asdict(self))

    def compact(self) -> str:
        """Return the rates over HTTP alone: a line for each kind of requests, a column for each number of streams."""
        cells = [name for name in WORKLOADS if name in self.http and not WORKLOADS[name].row]
        rows = list(dict.fromkeys(WORKLOADS[name].row for name in WORKLOADS if name in self.http))
        lines = []
        for row in rows:
            names = [f"{cell}-{row}" if row else cell for cell in cells]
            found = [(WORKLOADS[name], self.http[name]) if name in self.http else None for name in names]
            lines.append([row or "greedy", *(self._in_short(*each) if each else "-" for each in found)])
        return table(["tok/s, of greedy, longest gap in ms", *cells], lines) if lines else ""

    def _in_short(self, workload: Workload, runs: list[Summary]) -> str:
        rate = median(map(workload.rate, runs))
        return f"{rate:,.0f} {self._of_greedy(workload, rate)} {max(run.gap_max for run in runs):.0f}"

    def _workloads(self) -> str:
        names = [name for name in WORKLOADS if name in self.http or name in self.in_process]
        if not names:
            return ""
        head = ["streams x (prompt, output)", "HTTP tok/s", "of greedy", "TTFT p50 / p99", "gap p50 / p99 / max"]
        head += ["in process tok/s", "TTFT p50 / p99", "gap p50 / p99 / max", "HTTP / in process"]
        head += ["limit", "of limit", "vLLM tok/s", "TTFT p50 / p99", "ours / vLLM", "target"] if self.anchored else []
        rows = [self._row(WORKLOADS[name]) for name in names]
        note = (
            f"Closed loop of {ROUNDS} requests for each stream, one for prefill; in process one. "
            "Medians over the repetitions, times in ms; a gap is the time between two chunks of a stream. "
            f"Rates of prefill count prompt tokens. The target for HTTP is {HTTP_SHARE} of the rate in process."
        )
        note += f" vLLM: {VLLM}." if self.anchored else ""
        return f"{table(head, rows)}\n\n{note}"

    def _row(self, workload: Workload) -> list[str]:
        cell, anchors = workload.cell, workload.anchors
        http, inside = self.http.get(workload.name, []), self.in_process.get(workload.name, [])
        over_http, in_process = (median(map(workload.rate, runs)) if runs else 0.0 for runs in (http, inside))
        row = [
            f"{cell.concurrency} x ({cell.prompt_tokens}, {cell.max_tokens})"
            + (f" {workload.row}" * bool(workload.row))
        ]
        speed, *times = _figures(workload, http)
        row += [
            speed,
            self._of_greedy(workload, over_http),
            *times,
            *_figures(workload, inside),
            _quotient(over_http, in_process, digits=3),
        ]
        if self.anchored:
            best = over_http or in_process
            row += [f"{anchors.limit:,.0f}", _quotient(best, anchors.limit), f"{anchors.vllm:,.0f}"]
            row += [_pair(anchors.ttft_p50, anchors.ttft_p99), _quotient(best, anchors.vllm)]
            row += [self._targets(workload, best, http or inside)]
        return row

    def _targets(self, workload: Workload, rate: float, runs: list[Summary]) -> str:
        """Return the targets of a workload, and whether they were reached."""
        anchors = workload.anchors
        if workload.row:
            target, firsts = GREEDY_SHARE * self._greedy_rate(workload), []
        else:
            target = anchors.fp8_target if self.fp8 else anchors.target
            firsts = [
                ("p50", anchors.ttft_p50_target, median(run.ttft_p50 for run in runs)),
                ("p99", anchors.ttft_p99_target, median(run.ttft_p99 for run in runs)),
            ]
        found = [f"{target:,.0f} {'reached' if rate >= target else 'missed'}"] if target else []
        found += [
            f"{name} {most:,.0f} {'reached' if ttft <= most else 'missed'}" for name, most, ttft in firsts if most
        ]
        return ", ".join(found) or "-"

    def _of_greedy(self, workload: Workload, rate: float) -> str:
        """Return a row's rate as a share of that of greedy requests in the same run."""
        return _quotient(rate, self._greedy_rate(workload), digits=3) if workload.row else "-"

    def _greedy_rate(self, workload: Workload) -> float:
        """Return the rate of a row's greedy requests over HTTP; 0 if there were none."""
        greedy = self.http.get(workload.name.removesuffix(f"-{workload.row}"), [])
        return median(map(workload.rate, greedy)) if greedy else 0.0

    def _starts(self) -> str:
        if not self.starts:
            return ""
        rows = [[str(i + 1), f"{ready:.1f}", f"{answer:.1f}"] for i, (ready, answer) in enumerate(self.starts)]
        low, high = VLLM_READY_SECONDS
        note = f"Target for the second start: ready within {READY_SECONDS:g} s. vLLM took {low:g} to {high:g} s."
        return f"{table(['start', 'ready, s', 'first answer, s'], rows)}\n\n{note}"

    def _first_runs(self) -> str:
        if not self.first:
            return ""
        rows = [[name, *_figures(WORKLOADS[name], [run])] for name, run in self.first.items()]
        return table(["first run after the start", "tok/s", "TTFT p50 / p99", "gap p50 / p99 / max"], rows)

    def _agreements(self) -> str:
        head = ["against float32", "max error", "mean error", "same tokens", "same continuations", "worst margin"]
        rows = [
            [
                a.name,
                f"{a.max_error:.4f}",
                f"{a.mean_error:.5f}",
                f"{a.tokens:.2%}",
                f"{a.sequences:.1%}",
                f"{a.worst_margin:.4f}",
            ]
            for a in self.agreements
        ]
        note = (
            "Errors and margins are in nats, over the log-probabilities of the 20 likeliest tokens; "
            "transformers computes in the engine's type."
        )
        return f"{table(head, rows)}\n\n{note}" if rows else ""


def _figures(workload: Workload, runs: list[Summary]) -> list[str]:
    if not runs:
        return ["-"] * 3
    errors = sum(run.errors for run in runs)
    speed = f"{median(map(workload.rate, runs)):,.0f}" + (f" ({errors} errors)" if errors else "")
    first = _pair(median(run.ttft_p50 for run in runs), median(run.ttft_p99 for run in runs))
    gaps = _pair(median(run.gap_p50 for run in runs), median(run.gap_p99 for run in runs), digits=1)
    return [speed, first, f"{gaps} / {max(run.gap_max for run in runs):.0f}"]


def _pair(low: float, high: float, digits: int = 0) -> str:
    return " / ".join(f"{value:,.{digits}f}" if value else "-" for value in (low, high))


def _quotient(value: float, by: float, digits: int = 2) -> str:
    return f"{value / by:.{digits}f}" if value and by else "-"


def describe_gpu() -> dict[str, object]:
    """Return name, memory and driver of the GPUs; empty without GPUs."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {}
    return {"gpu": "; ".join(found.strip().splitlines())}
