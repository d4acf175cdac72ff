"""The workloads, and what they are held against."""

from dataclasses import dataclass

from benchmarks.report import Cell
from benchmarks.summary import Summary

VLLM = "vLLM 0.25.1 (CUDA graphs, torch.compile, FA3) over HTTP, same shape, dummy weights, one H200"
VLLM_READY_SECONDS = (91.0, 124.0)
READY_SECONDS = 30.0
"""What a second start is to stay under."""
HTTP_SHARE = 0.97
"""Of the rate in process, what HTTP is to keep."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """What one H200 allows, what vLLM reaches and what we want: tokens per second, milliseconds. 0 is unknown."""

    limit: float
    vllm: float
    target: float
    ttft_p50: float = 0.0
    ttft_p99: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """`cell.concurrency` requests, all sent at once. Of a `prefill` workload the prompt's tokens are counted, else the output's."""

    name: str
    cell: Cell
    anchors: Anchors
    prefill: bool = False

    def rate(self, summary: Summary) -> float:
        """Tokens per second, by the server's usage."""
        if self.prefill:
            return summary.prompt_tokens * (summary.requests - summary.errors) / summary.seconds
        return summary.tokens_per_second

    def warm_up(self) -> Cell:
        """As many prompts of this size, and enough output to have met every batch size on the way."""
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
