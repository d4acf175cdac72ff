"""The server's own metrics: of the engine, of the queue before it and of the event loop; and the page that shows all of them.

With several API processes prometheus_client keeps every value in files of a shared folder (PROMETHEUS_MULTIPROC_DIR), so that any of
them can show the sum. What the engine says of itself is not summed: each process asks the same engine.
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
from multimodal.media.cache import EmbeddingCache
from routers.state import ReplicaState
from server.metrics.embedding_cache import CacheMetrics
from server.metrics.engine import EngineCollector, InfoCollector

_LAG_PAUSE = 0.05
_LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STATS_PAUSE = 0.1


class _Collected:
    """Metrics that have been collected already, for a registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class ServerMetrics:
    """The registry of one application, and what keeps it up to date. `folder` is the shared one of several API processes."""

    def __init__(self, model_name: str, folder: Path | None) -> None:
        self.registry = CollectorRegistry()
        self.folder = folder
        self._model_name = model_name
        self._stats: IterationStats | None = None
        self._info: EngineInfo | None = None
        self._speed = 0.0
        self._updates: list[Callable[[], None]] = []
        self._queued = Gauge(
            "trtllm_num_requests_queued",
            "Sequences that wait in the API processes for their turn in the engine",
            ["model_name"],
            registry=self.registry,
            multiprocess_mode="livesum",
        ).labels(model_name)
        self._step: Histogram | None = None
        self._lag = Histogram(
            "event_loop_lag_seconds",
            "How late the event loop runs a timer",
            registry=self.registry,
            buckets=_LAG_BUCKETS,
        )
        self._last_lag = Gauge(
            "event_loop_lag_last_seconds",
            "The latest event_loop_lag_seconds",
            registry=self.registry,
            multiprocess_mode="livemax",
        )

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        for update in self._updates:
            update()
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
        """Have metrics of this process brought up to date by `update`, cheap, when a page is rendered and often in between."""
        self._updates.append(update)

    @property
    def iteration(self) -> int:
        """Steps that the engine has made, as far as it has said."""
        return self._stats.iteration if self._stats is not None else 0

    def watch_cache(self, cache: EmbeddingCache) -> None:
        """Report on this process' embedding cache, at most one in its life."""
        self.watch(CacheMetrics(self.registry, self._model_name, cache).update)

    async def watch_engine(self, engine: AdmissionEngine) -> None:
        """Keep the newest statistics, and the facts of the engine that they are of. Ends when the engine closes."""
        self._info = engine.info
        self._step = Histogram(
            "trtllm_iteration_duration_seconds",
            "The engine's steps, sampled: at most ten a second, in each API process",
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

    async def watch_loop(self, replica: ReplicaState) -> None:
        """Measure the event loop's lag, and note the length of the queue and what else is watched, until cancelled."""
        while True:
            due = time.perf_counter() + _LAG_PAUSE
            await asyncio.sleep(_LAG_PAUSE)
            lag = max(time.perf_counter() - due, 0.0)
            self._lag.observe(lag)
            self._last_lag.set(lag)
            engine = replica.engine
            self._queued.set(engine.waiting if engine is not None else 0)
            for update in self._updates:  # for the pages that other processes render
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
