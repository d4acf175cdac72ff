"""Workloads, and the figures to compare them with."""

from dataclasses import dataclass

from benchmarks.report import Cell
from server.bench.summary import Summary

VLLM = "vLLM 0.25.1 (CUDA graphs, torch.compile, FA3) over HTTP, same shape, dummy weights, one H200"
VLLM_READY_SECONDS = (91.0, 124.0)
READY_SECONDS = 30.0
"""Target for the second start."""
HTTP_SHARE = 0.97
"""Target for the rate over HTTP, as a share of the rate in process."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """Reference figures: the limit of one H200, vLLM's rate and our target in tokens per second; vLLM's TTFT in ms.

    0 means unknown.
    """

    limit: float
    vllm: float
    target: float
    ttft_p50: float = 0.0
    ttft_p99: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """`cell.concurrency` requests, sent at once. The rate counts prompt tokens of a `prefill` workload, else output."""

    name: str
    cell: Cell
    anchors: Anchors
    prefill: bool = False

    def rate(self, summary: Summary) -> float:
        """Return tokens per second, as counted by the server's usage."""
        if self.prefill:
            return summary.prompt_tokens * (summary.requests - summary.errors) / summary.seconds
        return summary.tokens_per_second

    def warm_up(self) -> Cell:
        """Return a cell with as many prompts, and enough output to run every batch size once."""
        return Cell(self.cell.concurrency, self.cell.prompt_tokens, min(self.cell.max_tokens, 24))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("1", Cell(1, 128, 256), Anchors(299, 209, 254)),
        Workload("64", Cell(64, 512, 256), Anchors(9_000, 6_867, 1.1 * 6_867, 389)),
        Workload("256", Cell(256, 512, 256), Anchors(13_400, 10_195, 1.15 * 10_195, 770, 3_050)),
        Workload("prefill", Cell(32, 4096, 1), Anchors(56_000, 41_150, 1.1 * 41_150), prefill=True),
    )
}
