"""The registry of an application, the metrics of its engine, queue and event loop, and the page that shows all metrics.

With several API processes prometheus_client keeps every value in files of a shared folder (PROMETHEUS_MULTIPROC_DIR),
so that any of them can show the sum.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from engine.admission import AdmissionEngine
from engine.kit.work import LANES
from engine.stats import IterationStats
from engine.types import EngineInfo
from server.metrics.engine import info_metrics, stats_metrics
from server.metrics.polled import Polled
from server.metrics.pushed import PushedMetrics
from server.metrics.vllm import vllm_metrics

_LAG_PAUSE = 0.05
_LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STATS_PAUSE = 0.1


class ServerMetrics(PushedMetrics):
    """The registry of one application, kept up to date. `folder` is the shared one of several API processes. With
    `vllm_names` the page shows metrics under vLLM's names as well.
    """

    def __init__(self, model_name: str, folder: Path | None, vllm_names: bool = False) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        super().__init__(CollectorRegistry(), model_name)
        self.folder = folder
        self._vllm_names = vllm_names
        self._stats: IterationStats | None = None
        self._info: EngineInfo | None = None
        self._speed = 0.0
        self._engine: AdmissionEngine | None = None
        self.polled = Polled(self.registry, {"model_name": model_name})
        """Metrics with the label model_name."""
        self.polled_unlabelled = Polled(self.registry, {})
        self._updates = [self.polled.update, self.polled_unlabelled.update]
        self.polled.gauge(
            "trtllm_num_requests_queued",
            "Sequences that wait in the API processes for the engine",
            lambda: self._engine.waiting if self._engine is not None else 0,
            "livesum",
        )
        self.polled_unlabelled.gauge(
            "trellis_work_waiting",
            "Jobs that wait for a thread: tokenising, decoding, hashing, look-ups of names and the like",
            lambda: sum(lane.waiting for lane in LANES),
            "livesum",
        )
        self._lag = Histogram(
            "trellis_event_loop_lag_seconds",
            "Seconds by which the event loop runs a timer late",
            registry=self.registry,
            buckets=_LAG_BUCKETS,
        )

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield what the page shows."""
        families = list(self._families())
        yield from families
        if self._vllm_names:
            yield from vllm_metrics(families)

    def _families(self) -> Iterator[Metric]:
        self._poll()
        source = self.registry if self.folder is None else MultiProcessCollector(CollectorRegistry(), str(self.folder))  # type: ignore[no-untyped-call]
        queued = 0.0
        for family in source.collect():
            if family.name == "trtllm_num_requests_queued":
                queued = sum(sample.value for sample in family.samples)
            yield family
        if self._info is not None:
            yield from info_metrics(self._info, self._model_name)
        if self._stats is not None:
            yield from stats_metrics(self._stats, queued, self._speed, self._model_name)

    def watch(self, update: Callable[[], None]) -> None:
        """Call `update`, which must be cheap, before each page, and often in between if other processes render
        pages; for values that `Polled` cannot show."""
        self._updates.append(update)

    @property
    def iteration(self) -> int:
        """Number of steps that the engine has reported."""
        return self._stats.iteration if self._stats is not None else 0

    async def watch_engine(self, engine: AdmissionEngine) -> None:
        """Keep the engine's newest facts and statistics. Ends when the engine closes."""
        self._engine = engine
        self._info = engine.info
        text = "Duration of the engine's steps, sampled: at most ten per second in each API process"
        fallbacks = self._counter(
            "own_weights", "Engines that loaded their own weights because the memory service could not be used"
        )
        fallbacks.inc(bool(engine.info.own_weights))
        step = self._histogram("iteration_duration_seconds", text, _STEP_BUCKETS)
        async for stats in engine.stats():
            before, self._stats = self._stats, stats
            if stats.iteration and (before is None or stats.iteration != before.iteration):
                step.observe(stats.iter_latency_ms / 1e3)
            seconds = stats.kv_transfer_latency_seconds - (before or stats).kv_transfer_latency_seconds
            if before is not None and seconds > 0:
                self._speed = (stats.kv_transfer_bytes - before.kv_transfer_bytes) / seconds
            if engine.healthy and engine.info is not self._info:  # one that closes has no facts, another one new ones
                self._info = engine.info
                fallbacks.inc(bool(self._info.own_weights))
            await asyncio.sleep(_STATS_PAUSE)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag until cancelled. Also update polled metrics if other processes render pages."""
        while True:
            due = time.perf_counter() + _LAG_PAUSE
            await asyncio.sleep(_LAG_PAUSE)
            self._lag.observe(max(time.perf_counter() - due, 0.0))
            if self.folder is not None:
                self._poll()

    def _poll(self) -> None:
        for update in self._updates:
            update()
