"""The server's own metrics: of the engine, of the queue before it and of the event loop; and the page that shows all of them.

With several API processes prometheus_client keeps every value in files of a shared folder (PROMETHEUS_MULTIPROC_DIR), so that any of
them can show the sum. What the engine says of itself is not summed: each process asks the same engine.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from engine.admission import AdmissionEngine
from engine.stats import IterationStats
from engine.types import EngineInfo
from multimodal.embedding_cache import EmbeddingCache
from routers.state import Replica
from server.cache_metrics import CacheMetrics

_LAG_PAUSE = 0.05
_LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_STATS_PAUSE = 0.1


class ServerMetrics:
    """The registry of one application, and what keeps it up to date. `folder` is the shared one of several API processes."""

    def __init__(self, model_name: str, folder: Path | None) -> None:
        self.registry = CollectorRegistry()
        self.folder = folder
        self._model_name = model_name
        self._stats: IterationStats | None = None
        self._info: EngineInfo | None = None
        self._updates: list[Callable[[], None]] = []
        self._queued = Gauge(
            "trtllm_num_requests_queued",
            "Sequences that wait in the API processes for their turn in the engine",
            ["model_name"],
            registry=self.registry,
            multiprocess_mode="livesum",
        ).labels(model_name)
        self._lag = Histogram(
            "event_loop_lag_seconds", "How late the event loop runs a timer", registry=self.registry, buckets=_LAG_BUCKETS
        )
        self._last_lag = Gauge(
            "event_loop_lag_last_seconds", "The latest event_loop_lag_seconds", registry=self.registry, multiprocess_mode="livemax"
        )

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        for update in self._updates:
            update()
        page = self.registry
        if self.folder is not None:
            page = CollectorRegistry()
            MultiProcessCollector(page, str(self.folder))  # type: ignore[no-untyped-call]
        engine = CollectorRegistry()
        if self._info is not None:
            engine.register(_InfoCollector(self._info, self._model_name))
        if self._stats is not None:
            queued = page.get_sample_value("trtllm_num_requests_queued", {"model_name": self._model_name}) or 0.0
            engine.register(_EngineCollector(self._stats, self._model_name, queued))
        return generate_latest(page) + generate_latest(engine)

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
        async for stats in engine.stats():
            self._stats = stats
            if engine.healthy:  # again, since after a restart it is another engine's; one that closes says nothing of itself
                self._info = engine.info
            await asyncio.sleep(_STATS_PAUSE)

    async def watch_loop(self, replica: Replica) -> None:
        """Measure the event loop's lag, and note the length of the queue and what else is watched, until cancelled."""
        while True:
            due = time.perf_counter() + _LAG_PAUSE
            await asyncio.sleep(_LAG_PAUSE)
            lag = max(time.perf_counter() - due, 0.0)
            self._lag.observe(lag)
            self._last_lag.set(lag)
            self._queued.set(replica.engine.waiting if replica.engine is not None else 0)
            for update in self._updates:  # for the pages that other processes render
                update()


class _Collector:
    """Metrics of one engine, labelled with its model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"trtllm_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"trtllm_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class _InfoCollector(_Collector):
    """What the engine said of itself when it had started."""

    def __init__(self, info: EngineInfo, model_name: str) -> None:
        super().__init__(model_name)
        self._info = info

    def collect(self) -> Iterable[Metric]:
        info = self._info
        yield self._gauge("model_load_time_seconds", "How long the model took to load", info.load_seconds)
        yield self._gauge("kv_cache_block_size", "Tokens in a KV block", info.block_size)
        yield self._gauge("data_parallel_size", "Ranks with a KV cache of their own", info.data_parallel_size)


class _EngineCollector(_Collector):
    """One moment of the engine, under TensorRT-LLM's names."""

    def __init__(self, stats: IterationStats, model_name: str, queued: float) -> None:
        super().__init__(model_name)
        self._stats = stats
        self._queued = queued

    def collect(self) -> Iterable[Metric]:
        stats, blocks = self._stats, self._stats.kv_cache_stats
        yield self._gauge("num_requests_running", "Sequences that run", stats.num_active_requests)
        yield self._gauge("num_requests_waiting", "Sequences that wait, in and before the engine", stats.num_queued_requests + self._queued)
        yield self._gauge("kv_cache_utilization", "Part of the KV blocks in use", blocks.used_num_blocks / max(blocks.max_num_blocks, 1))
        yield self._gauge("kv_cache_hit_rate", "Part of the prompts' blocks that were reused", blocks.cache_hit_rate)
        yield self._gauge("kv_cache_max_blocks", "KV blocks", blocks.max_num_blocks)
        yield self._gauge("kv_cache_used_blocks", "KV blocks that live sequences hold", blocks.used_num_blocks)
        yield self._gauge("kv_cache_free_blocks", "KV blocks that can be taken", blocks.free_num_blocks)
        yield self._counter("kv_cache_reused_blocks", "Blocks of prompts found in the cache", blocks.reused_blocks)
        yield self._counter("kv_cache_missed_blocks", "Blocks of prompts not found in the cache", blocks.missed_blocks)
        yield self._counter("num_requests_completed", "Sequences that finished in the engine", stats.num_completed_requests)
        yield self._counter("engine_aborted_requests", "Sequences that were aborted in the engine", stats.num_aborted_requests)
        yield self._counter(
            "num_preemptions", "Sequences that lost their KV blocks to others and were computed again", stats.num_preemptions
        )
        yield self._counter("iterations", "Steps of the engine", stats.iteration)
        yield self._gauge("iteration_latency_seconds", "The engine's latest step", stats.iter_latency_ms / 1e3)
        yield from self._collect_transfers(stats)

    def _collect_transfers(self, stats: IterationStats) -> Iterable[Metric]:
        """Of KV blocks that go from replica to replica."""
        yield self._gauge("num_requests_held", "Prompts whose KV blocks are kept for another replica", stats.num_held_requests)
        yield self._gauge("kv_cache_held_blocks", "Their KV blocks", stats.num_held_blocks)
        yield self._gauge("num_requests_fetching", "Sequences whose KV blocks are being read", stats.num_fetching_requests)
        yield self._counter("kv_transfer_success", "Prompts whose KV blocks were read", stats.kv_transfer_success_total)
        yield self._counter("kv_transfer_failure", "Prompts computed again, as reading them failed", stats.kv_transfer_failure_total)
        yield self._counter("kv_transfer_bytes", "Bytes of KV blocks read", stats.kv_transfer_bytes)
        yield self._counter("kv_transfer_latency_seconds", "Time that reading them took", stats.kv_transfer_latency_seconds)
