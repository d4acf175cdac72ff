"""What is measured of the embedding cache, of which each API process has one."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from multimodal.media.cache import CacheStats, EmbeddingCache


class CacheMetrics:
    """The statistics of one cache as Prometheus metrics, which add up over processes; `update` brings them up to date."""

    def __init__(self, registry: CollectorRegistry, model_name: str, cache: EmbeddingCache) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"trtllm_embedding_cache_{name}", text, ["model_name"], registry=registry).labels(model_name)

        def gauge(name: str, text: str, mode: Literal["livesum", "livemax"]) -> Gauge:
            family = Gauge(
                f"trtllm_embedding_cache_{name}", text, ["model_name"], registry=registry, multiprocess_mode=mode
            )
            return family.labels(model_name)

        self._cache = cache
        self._seen = CacheStats(0, 0, 0, 0, 0, 0.0)
        self._hits = counter("hits", "Images whose embeddings were in the cache")
        self._misses = counter("misses", "Images whose embeddings were not in the cache")
        self._evictions = counter("evictions", "Images whose embeddings made room for others")
        self._bytes = gauge("bytes", "Bytes of the embeddings in the cache", "livesum")
        self._entries = gauge("entries", "Images whose embeddings are in the cache", "livesum")
        self._utilization = gauge(
            "utilization", "Part of the cache in use; of several API processes the fullest", "livemax"
        )

    def update(self) -> None:
        stats = self._cache.stats
        if stats == self._seen:
            return
        self._hits.inc(stats.hits - self._seen.hits)
        self._misses.inc(stats.misses - self._seen.misses)
        self._evictions.inc(stats.evictions - self._seen.evictions)
        self._bytes.set(stats.bytes)
        self._entries.set(stats.entries)
        self._utilization.set(stats.utilisation)
        self._seen = stats
