"""What a load run comes to: rates, percentiles, counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.client import Sample


@dataclass(frozen=True, slots=True)
class Summary:
    """One measurement. Times in milliseconds unless they say otherwise; failed requests count in `requests` and `errors` only."""

    seconds: float
    requests: int
    errors: int
    first_error: str
    prompt_tokens: float
    """Mean of a request."""
    cached_tokens: int
    """Sum over all requests; a run that is to measure prefill has almost none."""
    completion_tokens: int
    tokens_per_second: float
    chunks: int
    chunks_per_second: float
    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    """Between chunks of a stream."""
    gap_p99: float

    def asdict(self) -> dict[str, float | int | str]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` percent of the values do not exceed (nearest rank); 0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarise(samples: Sequence[Sample], seconds: float) -> Summary:
    """Sum up the requests of a run that took `seconds`."""
    good = [sample for sample in samples if not sample.error]
    gaps = [gap for sample in good for gap in sample.gaps]
    ttfts = [sample.ttft for sample in good]
    tokens = sum(sample.completion_tokens for sample in good)
    chunks = sum(sample.chunks for sample in good)
    return Summary(
        seconds=seconds,
        requests=len(samples),
        errors=len(samples) - len(good),
        first_error=next((sample.error for sample in samples if sample.error), ""),
        prompt_tokens=sum(sample.prompt_tokens for sample in good) / max(1, len(good)),
        cached_tokens=sum(sample.cached_tokens for sample in good),
        completion_tokens=tokens,
        tokens_per_second=tokens / seconds,
        chunks=chunks,
        chunks_per_second=chunks / seconds,
        ttft_p50=percentile(ttfts, 50) * 1e3,
        ttft_p99=percentile(ttfts, 99) * 1e3,
        gap_p50=percentile(gaps, 50) * 1e3,
        gap_p99=percentile(gaps, 99) * 1e3,
    )
