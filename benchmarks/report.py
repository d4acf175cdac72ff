"""Write measurements as Markdown tables and as JSON."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from server.bench.machine import describe_machine
from server.bench.summary import Summary


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: number of streams, and tokens per prompt and output."""

    concurrency: int
    prompt_tokens: int
    max_tokens: int

    def __str__(self) -> str:
        return f"{self.concurrency}:{self.prompt_tokens}:{self.max_tokens}"


@dataclass(slots=True)
class Report:
    """All results of a run. `cells` has one summary per repetition, by cell and server."""

    label: str
    settings: dict[str, object]
    cells: dict[str, dict[str, list[Summary]]] = field(default_factory=dict)
    servers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds until ready and until the first answer, and resident MiB, by server."""
    others: list[float] = field(default_factory=list)
    """Cores used by other processes during each measurement; near 0 on an idle machine."""
    http: dict[str, float | int | str] = field(default_factory=dict)
    """Results of the server on FakeEngine."""
    machine: dict[str, object] = field(default_factory=lambda: describe_machine())

    def markdown(self) -> str:
        facts = "\n".join(f"- {key}: {value}" for key, value in {**self.machine, **self.settings}.items())
        parts = [f"# Benchmark: {self.label}", facts, self._cells(), self._servers(), self._http()]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _cells(self) -> str:
        names = list(dict.fromkeys(name for row in self.cells.values() for name in row))
        if not names:
            return ""
        peers = names[1:]
        head = [
            "streams",
            "prompt",
            "output",
            *(f"{name} {what}" for name in names for what in ("tok/s", "TTFT p50/p99", "gap p50/p99")),
        ]
        head += [f"{names[0]} / {peer}" for peer in peers]
        rows = []
        for cell, results in self.cells.items():
            row = [*cell.split(":")]
            for name in names:
                row += _figures(results[name])
            row += [f"{ratio(results[names[0]], results[peer]):.2f}" for peer in peers]
            rows.append(row)
        note = (
            "Medians over the repetitions, times in ms. A gap is the time between two chunks of a stream. "
            "Ratios are of tok/s, paired by repetition. Other processes used "
            f"{median(self.others):.2f} cores (median), {max(self.others):.2f} at most."
        )
        return f"{table(head, rows)}\n\n{note}"

    def _servers(self) -> str:
        rows = [
            [name, *(f"{facts[key]:.1f}" for key in ("ready", "answer", "memory"))]
            for name, facts in self.servers.items()
        ]
        return table(["server", "ready, s", "first answer, s", "resident, MiB"], rows) if rows else ""

    def _http(self) -> str:
        rows = [[key, f"{value:.1f}" if isinstance(value, float) else str(value)] for key, value in self.http.items()]
        return table(["HTTP alone (FakeEngine)", ""], rows) if rows else ""

    def write(self, folder: Path) -> Path:
        """Write the .json and the .md file; return the path of the latter."""
        return save(folder, self.label, self.markdown(), asdict(self))


def save(folder: Path, label: str, markdown: str, content: dict[str, object]) -> Path:
    """Write a Markdown page named by date and label, and the JSON next to it; return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{time.strftime('%Y-%m-%d')}-{label}.md"
    page.write_text(markdown)
    page.with_suffix(".json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    return page


def _figures(repeats: list[Summary]) -> list[str]:
    errors = sum(summary.errors for summary in repeats)
    speed = f"{median(s.tokens_per_second for s in repeats):.1f}" + (f" ({errors} errors)" if errors else "")
    first = f"{median(s.ttft_p50 for s in repeats):.0f} / {median(s.ttft_p99 for s in repeats):.0f}"
    gap = f"{median(s.gap_p50 for s in repeats):.1f} / {median(s.gap_p99 for s in repeats):.1f}"
    return [speed, first, gap]


def ratio(ours: list[Summary], peer: list[Summary]) -> float:
    """Return the median speed-up over paired repetitions; infinite if the peer produced nothing."""
    pairs = zip(ours, peer, strict=True)
    return median(a.tokens_per_second / b.tokens_per_second if b.tokens_per_second else float("inf") for a, b in pairs)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "| " + " | ".join(value.rjust(width) for value, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(text)
