"""Attention-DP ranks: which one computes a request, and their statistics.

Each rank has a KV cache of its own, so a prompt's start is found again only by a request to the same rank. TensorRT-LLM
balances requests over the ranks, and looks at no cache.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.kv_events import KvEvent
from engine.replicas.publisher.convert import Converter
from engine.replicas.publisher.messages import EventBatch, encode
from engine.replicas.routing.events import decode
from engine.replicas.routing.index import PrefixIndex
from engine.replicas.routing.load import Assignment, Load
from engine.replicas.routing.policy import Policy
from engine.stats import IterationStats, KvCacheStats, RankStats
from engine.types import GenerateRequest


@dataclass
class _Rank:
    """A candidate for the policy."""

    number: int
    converter: Converter
    load: Load = field(default_factory=Load)
    last_asked: int = 0


class Ranks:
    """Chooses a rank for each request: the router's, or the one with the least left to compute, by its own KV events.

    Without KV events (`knows_caches`), only a router's choice is passed on.
    """

    def __init__(self, size: int, block_size: int, *, knows_caches: bool) -> None:
        self._ranks = [_Rank(number, Converter(block_size)) for number in range(size)]
        self._knows_caches = knows_caches
        self.index = PrefixIndex()
        """The contents of each rank's cache."""
        self._policy = Policy("kv")

    def note(self, event: KvEvent) -> None:
        """Learn what a rank has in its cache."""
        number = event.attention_dp_rank or 0
        if len(self._ranks) > 1 and number < len(self._ranks):
            batch = EventBatch(time.time(), list(self._ranks[number].converter.convert(event)))
            for known in decode(encode(batch)):
                self.index.apply(number, known)

    def assign(self, request: GenerateRequest) -> tuple[int | None, Assignment | None]:
        """Return the rank that is to compute a request, None if the engine chooses, and the work assigned to it.

        A rank that does not exist would end the executor; the router may have it from before a restart.
        """
        asked = request.dp_rank if request.dp_rank is not None and 0 <= request.dp_rank < len(self._ranks) else None
        if len(self._ranks) == 1 or (asked is None and not self._knows_caches):
            return None, None
        tokens = request.prompt_token_ids
        overlaps = self.index.overlaps(tokens, (request.cache_salt, ""))
        rank = self._ranks[asked] if asked is not None else self._policy.choose(self._ranks, len(tokens), overlaps)
        overlap = min(overlaps.get(rank.number, 0), max(0, len(tokens) - 1))
        return rank.number, Assignment(rank.load, len(tokens), overlap)


def idle(stats: IterationStats) -> IterationStats:
    """Return statistics as they are once nothing runs, which the engine does not report."""
    ranks = tuple(
        replace(rank, num_active_requests=0, num_queued_requests=0, kv_cache_stats=_freed(rank.kv_cache_stats))
        for rank in stats.ranks
    )
    cache = _freed(stats.kv_cache_stats)
    return replace(stats, num_active_requests=0, num_queued_requests=0, kv_cache_stats=cache, ranks=ranks)


def _freed(cache: KvCacheStats) -> KvCacheStats:
    return replace(cache, used_num_blocks=0, free_num_blocks=cache.max_num_blocks)


def summed(rows: Iterable[IterationStats]) -> IterationStats:
    """Return the newest rows of several ranks as one, with the figures of each in `ranks`."""
    ordered = sorted(rows, key=lambda row: row.attention_dp_rank or 0)
    newest = max(ordered, key=lambda row: row.iteration)
    caches = [row.kv_cache_stats for row in ordered]
    reused = sum(cache.reused_blocks for cache in caches)
    missed = sum(cache.missed_blocks for cache in caches)
    cache = KvCacheStats(
        max_num_blocks=sum(cache.max_num_blocks for cache in caches),
        free_num_blocks=sum(cache.free_num_blocks for cache in caches),
        used_num_blocks=sum(cache.used_num_blocks for cache in caches),
        tokens_per_block=newest.kv_cache_stats.tokens_per_block,
        alloc_total_blocks=sum(cache.alloc_total_blocks for cache in caches),
        alloc_new_blocks=sum(cache.alloc_new_blocks for cache in caches),
        reused_blocks=reused,
        missed_blocks=missed,
        cache_hit_rate=reused / max(1, reused + missed),
    )
    return replace(
        newest,
        attention_dp_rank=None,
        num_active_requests=sum(row.num_active_requests for row in ordered),
        num_queued_requests=sum(row.num_queued_requests for row in ordered),
        num_completed_requests=sum(row.num_completed_requests for row in ordered),
        kv_cache_stats=cache,
        ranks=tuple(
            RankStats(
                rank=row.attention_dp_rank or 0,
                num_active_requests=row.num_active_requests,
                num_queued_requests=row.num_queued_requests,
                kv_cache_stats=row.kv_cache_stats,
            )
            for row in ordered
        ),
    )
