"""One request as the client sees it, and the summary of a run: rates, percentiles and counts."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class Sample:
    """One request as the client sees it; times in seconds."""

    seconds: float = 0.0
    ttft: float = 0.0
    """Time until the first event with text; 0 without one."""
    chunks: int = 0
    """Number of events with data, without the final `[DONE]`."""
    gaps: list[float] = field(default_factory=list)
    """Times between events after the first text; 0 for events that arrive together."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def itl(self) -> float:
        """Mean time between two tokens after the first text, whatever chunks they came in; 0 for a single token."""
        return max(0.0, self.seconds - self.ttft) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One measurement. Times are in milliseconds unless named otherwise.

    Failed requests count only in `requests` and `errors`.
    """

    seconds: float
    requests: int
    errors: int
    first_error: str
    prompt_tokens: float
    """Mean per request."""
    cached_tokens: int
    """Sum over all requests; near 0 in a run that measures prefill."""
    completion_tokens: int
    tokens_per_second: float
    chunks: int
    chunks_per_second: float
    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    """Time between chunks of a stream."""
    gap_p99: float
    gap_max: float = 0.0

    def asdict(self) -> dict[str, float | int | str]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile; 0 without values."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarise(samples: Sequence[Sample], seconds: float) -> Summary:
    """Summarise the requests of a run that took `seconds`."""
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
        gap_max=max(gaps, default=0.0) * 1e3,
    )
