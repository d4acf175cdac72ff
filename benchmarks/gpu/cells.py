"""Workloads, and the figures to compare them with."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report import Cell
from server.bench.summary import Summary

VLLM = "vLLM 0.25.1 (CUDA graphs, torch.compile, FA3) over HTTP, same shape, dummy weights, one H200"
VLLM_READY_SECONDS = (91.0, 124.0)
READY_SECONDS = 10.0
"""Target for the second start."""
HTTP_SHARE = 0.97
"""Target for the rate over HTTP, as a share of the rate in process."""
GREEDY_SHARE = 0.95
"""Target for the rate of other kinds of requests, as a share of that of greedy ones."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """Reference figures: the limit of one H200, vLLM's rate and our targets in tokens per second, with weights and
    cache of 16 bits and of 8; vLLM's TTFT in ms, and our targets for that. 0 means none.

    Limit and vLLM's figures are those of 16 bits.
    """

    limit: float
    vllm: float
    target: float
    fp8_target: float = 0.0
    ttft_p50: float = 0.0
    ttft_p99: float = 0.0
    ttft_p50_target: float = 0.0
    ttft_p99_target: float = 0.0


Fields = dict[str, object]
"""Sampling parameters in addition to those of greedy requests."""
_NUMBERS: Fields = {"type": "array", "items": {"type": "integer"}, "minItems": 300}
"""A schema that no answer of 256 tokens completes."""
_STRINGS: Fields = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 300}
"""Another one, whose masks are among the dearest: most tokens are right, and some are too long."""
ROWS: dict[str, Callable[[random.Random, int], Fields]] = {
    "temperature": lambda *_: {"temperature": 1},
    "truncated": lambda *_: {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "seed": lambda rng, _: {"temperature": 1, "seed": rng.getrandbits(31)},
    "penalty": lambda *_: {"frequency_penalty": 0.5},
    "logprobs": lambda *_: {"logprobs": 1},
    "min-tokens": lambda _, max_tokens: {"min_tokens": max_tokens},
    "guided": lambda *_: {"guided_json": _NUMBERS},
    "strings": lambda *_: {"guided_json": _STRINGS},
    "mixed": lambda rng, max_tokens: (
        ROWS[rng.choice(_MIXED)](rng, max_tokens)
        | {"temperature": round(rng.uniform(0.1, 1.5), 2), "top_p": rng.choice((1, 0.9, 0.99)), "min_p": 0.01}
    ),
}
"""Kinds of requests that are measured beside greedy ones, by the fields that a request of this many tokens adds.
`mixed` is a batch in which each request differs."""
_MIXED = [name for name in ROWS if name not in ("mixed", "guided", "strings")]
ROUNDS = 3
"""Requests of each stream, one after the other; all streams start at once."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`cell.concurrency` streams in a closed loop. The rate counts prompt tokens of a `prefill` workload, each stream
    of which sends one request, else output. `row` is a key of ROWS; greedy requests have none."""

    name: str
    cell: Cell
    anchors: Anchors
    prefill: bool = False
    row: str = ""

    def rate(self, summary: Summary) -> float:
        """Return tokens per second, as counted by the server's usage."""
        if self.prefill:
            return summary.prompt_tokens * (summary.requests - summary.errors) / summary.seconds
        return summary.tokens_per_second

    def warm_up(self) -> Cell:
        """Return a cell, for one round, with as many prompts, and enough output to run every batch size once. Greedy
        workloads have run before those of a row, of which a few requests of every kind are enough."""
        if self.row:
            return Cell(min(self.cell.concurrency, 16), 32, 8)
        return Cell(self.cell.concurrency, self.cell.prompt_tokens, min(self.cell.max_tokens, 24))

    def fields(self, rng: random.Random, max_tokens: int) -> Fields:
        """Return the fields that the next request, of this many tokens, has in addition to a greedy one."""
        return ROWS[self.row](rng, max_tokens) if self.row else {}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("1", Cell(1, 128, 256), Anchors(299, 209, 262, 350)),
        Workload("64", Cell(64, 512, 256), Anchors(9_000, 6_867, 7_900, 9_700, 389)),
        Workload("256", Cell(256, 512, 256), Anchors(13_400, 10_195, 11_200, 14_500, 770, 3_050, 550, 3_050)),
        Workload("prefill", Cell(32, 4096, 1), Anchors(56_000, 41_150, 44_000), prefill=True),
    )
}
GREEDY = tuple(WORKLOADS)
WORKLOADS |= {
    f"{name}-{row}": Workload(f"{name}-{row}", WORKLOADS[name].cell, WORKLOADS[name].anchors, row=row)
    for name in GREEDY
    if not WORKLOADS[name].prefill
    for row in ROWS
}
