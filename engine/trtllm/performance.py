"""A request's own times and counts as TensorRT-LLM measures them, if `return_perf_metrics` is set.

`CompletionOutput.request_perf_metrics` is the binding `RequestPerfMetrics`; every response has it. Its moments are
`timedelta`s on the worker's steady clock, so only differences have a meaning; 0 is a moment that has not come.
"""

from datetime import timedelta
from typing import Any

from engine.types import Performance

_NEVER = timedelta()


class TransferCounts:
    """KV transfers to this engine since its start, under the names of `IterationStats`."""

    def __init__(self) -> None:
        self.kv_transfer_success_total = 0
        self.kv_transfer_failure_total = 0
        self.kv_transfer_bytes = 0
        self.kv_transfer_latency_seconds = 0.0

    def note(self, measured: Performance | None) -> None:
        """Note that a request that went on from a handoff has ended."""
        self.kv_transfer_success_total += 1
        if measured is not None:
            self.kv_transfer_bytes += measured.transfer_bytes
            self.kv_transfer_latency_seconds += measured.transfer_seconds


def queue_seconds(metrics: Any) -> float:
    """Return how long the request waited in the engine; 0 if that is not known."""
    if metrics is None:
        return 0.0
    timing = metrics.timing_metrics
    return _seconds(timing.arrival_time, timing.first_scheduled_time)


def performance(metrics: Any, tokens: int) -> Performance | None:
    """Return the figures of a request that has ended with `tokens` tokens; None without metrics."""
    if metrics is None:
        return None
    timing, drafts = metrics.timing_metrics, metrics.speculative_decoding
    return Performance(
        first_token_seconds=_seconds(timing.arrival_time, timing.first_token_time),
        token_seconds=_seconds(timing.first_token_time, timing.last_token_time) / max(1, tokens - 1),
        seconds=_seconds(timing.arrival_time, timing.last_token_time),
        transfer_seconds=_seconds(timing.kv_cache_transfer_start, timing.kv_cache_transfer_end),
        transfer_bytes=timing.kv_cache_size,
        draft_tokens=drafts.total_draft_tokens,
        accepted_tokens=drafts.total_accepted_draft_tokens,
    )


def _seconds(start: timedelta, end: timedelta) -> float:
    return 0.0 if _NEVER in (start, end) else max(0.0, (end - start).total_seconds())
