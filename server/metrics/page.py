"""The registry of an application, the metrics of its engine, queue and event loop, and the page that shows all metrics.

With several API processes prometheus_client keeps every value in files of a shared folder (PROMETHEUS_MULTIPROC_DIR),
so that any of them can show the sum. What the engine reports of itself is not summed: each process asks the same
engine.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from engine.admission import AdmissionEngine
from engine.stats import IterationStats
from engine.types import EngineInfo
from server.metrics.engine import EngineCollector, InfoCollector
from server.metrics.polled import Polled

_LAG_PAUSE = 0.05
_LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STATS_PAUSE = 0.1


class _Collected:
    """Metrics that are already collected, for a registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class ServerMetrics:
    """The registry of one application, and what keeps it up to date. `folder` is the shared one of several API
    processes.
    """

    def __init__(self, model_name: str, folder: Path | None) -> None:
        self.registry = CollectorRegistry()
        self.folder = folder
        self._model_name = model_name
        self._stats: IterationStats | None = None
        self._info: EngineInfo | None = None
        self._speed = 0.0
        self._engine: AdmissionEngine | None = None
        self.polled = Polled(self.registry, {"model_name": model_name})
        """For numbers that are shown with the label model_name."""
        self.polled_unlabelled = Polled(self.registry, {})
        self._updates = [self.polled.update, self.polled_unlabelled.update]
        self.polled.gauge(
            "trtllm_num_requests_queued",
            "Sequences that wait in the API processes for the engine",
            lambda: self._engine.waiting if self._engine is not None else 0,
            "livesum",
        )
        self._step: Histogram | None = None
        self._lag = Histogram(
            "event_loop_lag_seconds",
            "Seconds by which the event loop runs a timer late",
            registry=self.registry,
            buckets=_LAG_BUCKETS,
        )
        self._last_lag = Gauge(
            "event_loop_lag_last_seconds",
            "Latest value of event_loop_lag_seconds",
            registry=self.registry,
            multiprocess_mode="livemax",
        )

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        self._poll()
        source = self.registry if self.folder is None else MultiProcessCollector(CollectorRegistry(), str(self.folder))  # type: ignore[no-untyped-call]
        counted = list(source.collect())  # once, as it reads the files of all processes
        page = CollectorRegistry()
        page.register(_Collected(counted))
        if self._info is not None:
            page.register(InfoCollector(self._info, self._model_name))
        if self._stats is not None:
            queued = sum(
                sample.value
                for family in counted
                if family.name == "trtllm_num_requests_queued"
                for sample in family.samples
            )
            page.register(EngineCollector(self._stats, self._model_name, queued, self._speed))
        return generate_latest(page)

    def watch(self, update: Callable[[], None]) -> None:
        """Have `update` read what `Polled` cannot show, when a page is rendered and often in between. It has to be
        cheap.
        """
        self._updates.append(update)

    @property
    def iteration(self) -> int:
        """Number of steps that the engine has reported."""
        return self._stats.iteration if self._stats is not None else 0

    async def watch_engine(self, engine: AdmissionEngine) -> None:
        """Keep the engine's newest facts and statistics. Ends when the engine closes."""
        self._engine = engine
        self._info = engine.info
        self._step = Histogram(
            "trtllm_iteration_duration_seconds",
            "Duration of the engine's steps, sampled: at most ten per second in each API process",
            ["model_name"],
            registry=self.registry,
            buckets=_STEP_BUCKETS,
        ).labels(self._model_name)
        async for stats in engine.stats():
            self._note(stats)
            if (
                engine.healthy
            ):  # again, since after a restart it is another engine's; one that closes says nothing of itself
                self._info = engine.info
            await asyncio.sleep(_STATS_PAUSE)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag, and read what is polled, for the pages that other processes render, until
        cancelled.
        """
        while True:
            due = time.perf_counter() + _LAG_PAUSE
            await asyncio.sleep(_LAG_PAUSE)
            lag = max(time.perf_counter() - due, 0.0)
            self._lag.observe(lag)
            self._last_lag.set(lag)
            self._poll()

    def _poll(self) -> None:
        for update in self._updates:
            update()

    def _note(self, stats: IterationStats) -> None:
        before, self._stats = self._stats, stats
        if self._step is not None and stats.iteration and (before is None or stats.iteration != before.iteration):
            self._step.observe(stats.iter_latency_ms / 1e3)
        if (
            before is not None
            and (seconds := stats.kv_transfer_latency_seconds - before.kv_transfer_latency_seconds) > 0
        ):
            self._speed = (stats.kv_transfer_bytes - before.kv_transfer_bytes) / seconds
