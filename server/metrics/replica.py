"""Metrics of a replica as a whole: what it is, whether it is ready, and the results of its own checks."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.process.child import ServiceProcess
from multimodal.media.cache import EmbeddingCache
from server import __version__
from server.metrics.polled import Polled


def show_identity(registry: CollectorRegistry, model_name: str, role: str, backend: str) -> None:
    """Show what this replica is, by labels."""
    info = Gauge(
        "trellis_info",
        "1; its labels describe this replica",
        ["model_name", "role", "backend", "version"],
        registry=registry,
        multiprocess_mode="livemax",
    )
    info.labels(model_name, role, backend, __version__).set(1)


def watch_checks(polled: Polled, ready: Callable[[], bool], canaries: Callable[[], Mapping[str, float]]) -> None:
    """Show readiness, and the outcomes of canary requests."""
    polled.gauge("trellis_ready", "1 if the replica takes requests", ready, "livemin")
    polled.counters("trellis_canary_requests", "Canary requests of the replica to itself", "outcome", canaries)


def watch_engine_process(polled: Polled, process: ServiceProcess) -> None:
    """Show restarts of the engine's process, and the one that stands by."""
    polled.counter("trellis_engine_restarts", "Times that the engine's process was replaced", lambda: process.restarts)
    polled.counter("trellis_engine_takeovers", "Times that a standby process replaced it", lambda: process.takeovers)
    polled.gauge(
        "trellis_engine_standby",
        "1 if a standby process is prepared to take over",
        lambda: process.standby_pid is not None,
        "livemax",
    )


class WatchdogMetrics:
    """Metrics of the event loop's watchdog, set by its thread: nothing is polled while the loop is blocked."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._blocked = Gauge(
            "trellis_event_loop_blocked",
            "1 while an event loop is blocked",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._blocks = Counter("trellis_event_loop_blocks", "Times that an event loop was blocked", registry=registry)

    def report(self, blocked: bool) -> None:
        """Note that the event loop is blocked, or runs again."""
        self._blocked.set(blocked)
        if blocked:
            self._blocks.inc()


def watch_cache(polled: Polled, cache: EmbeddingCache) -> None:
    """Show the statistics of the embedding cache, of which each API process has at most one."""
    name = "trtllm_embedding_cache"
    polled.counter(f"{name}_hits", "Files whose embeddings were in the cache", lambda: cache.stats.hits)
    polled.counter(f"{name}_misses", "Files whose embeddings were not in the cache", lambda: cache.stats.misses)
    polled.counter(f"{name}_evictions", "Files whose embeddings were evicted", lambda: cache.stats.evictions)
    polled.gauge(f"{name}_bytes", "Bytes of the embeddings in the cache", lambda: cache.stats.bytes, "livesum")
    polled.gauge(f"{name}_entries", "Files whose embeddings are in the cache", lambda: cache.stats.entries, "livesum")
    polled.gauge(
        f"{name}_utilization",
        "Fraction of the cache in use; of several API processes the highest",
        lambda: cache.stats.utilisation,
        "livemax",
    )
