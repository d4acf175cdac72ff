"""What `return_perf_metrics` adds to a result."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from tensorrt_llm.metrics import MetricNames


def metrics_dict(times: dict[str, float], output: Any) -> dict[Any, Any]:
    """Seconds under members of MetricNames, those above 0, and the reason of the end."""
    first, tokens = times.get("first_token", times["last_token"]), max(1, len(output.token_ids) - 1)
    seconds = {
        MetricNames.TTFT: first - times["arrival"],
        MetricNames.TPOT: (times["last_token"] - first) / tokens,
        MetricNames.E2E: times["last_token"] - times["arrival"],
        MetricNames.REQUEST_QUEUE_TIME: times.get("scheduled", times["arrival"]) - times["arrival"],
    }
    found: dict[Any, Any] = {name: value for name, value in seconds.items() if value > 0}
    return found | {MetricNames.ARRIVAL_TIMESTAMP: times["arrival"], "finished_reason": output.finish_reason}


def perf_metrics(
    times: dict[str, float], iterations: int, cached_tokens: int, drafts: tuple[int, int] = (0, 0)
) -> SimpleNamespace:
    """The shape of the binding `RequestPerfMetrics`. Of the cache it knows only whether anything was reused.

    `drafts`: draft tokens, and those of them that were accepted.
    """
    moment = {name: timedelta(seconds=value) for name, value in times.items() if name != "transfer_bytes"}
    none = timedelta()
    timing = SimpleNamespace(
        arrival_time=moment["arrival"],
        first_scheduled_time=moment.get("scheduled", none),
        first_token_time=moment.get("first_token", none),
        last_token_time=moment["last_token"],
        kv_cache_transfer_start=moment.get("transfer_start", none),
        kv_cache_transfer_end=moment.get("transfer_end", none),
        kv_cache_size=int(times.get("transfer_bytes", 0)),
    )
    cache = SimpleNamespace(
        num_total_allocated_blocks=0,
        num_new_allocated_blocks=0,
        num_reused_blocks=int(cached_tokens > 0),
        num_missed_blocks=0,
    )
    drafted, accepted = drafts
    speculation = SimpleNamespace(
        acceptance_rate=accepted / max(1, drafted), total_accepted_draft_tokens=accepted, total_draft_tokens=drafted
    )
    return SimpleNamespace(
        first_iter=0,
        last_iter=iterations,
        iter=iterations,
        timing_metrics=timing,
        kv_cache_metrics=cache,
        speculative_decoding=speculation,
    )
