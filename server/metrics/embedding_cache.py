"""Metrics of the embedding cache, of which each API process has at most one."""

from multimodal.media.cache import EmbeddingCache
from server.metrics.polled import Polled


def watch_cache(polled: Polled, cache: EmbeddingCache) -> None:
    """Show the statistics of `cache`."""
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
