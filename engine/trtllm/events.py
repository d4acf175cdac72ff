"""TensorRT-LLM's KV-cache events and iteration statistics, dicts in their JSON shapes, as our types. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.errors import EngineFailure
from engine.kv_events import KvEvent
from engine.stats import InflightBatchingStats, IterationStats, KvCacheStats


def kv_event(raw: Mapping[str, Any]) -> KvEvent:
    """Hashes are taken as unsigned 64-bit, whichever way they are signed. Raises msgspec.ValidationError for what is no event we know."""
    return msgspec.convert(_unsigned(raw), KvEvent)


def iteration_stats(raw: Mapping[str, Any]) -> IterationStats:
    """Every key is optional there: what is missing is 0. The timestamp is the engine's text or number; ours is in seconds. Raises
    AttributeError, msgspec.ValidationError, TypeError and ValueError for what are no statistics.
    """
    cache = raw.get("kvCacheStats") or {}
    blank = {"maxNumBlocks": 0, "freeNumBlocks": 0, "usedNumBlocks": 0, "tokensPerBlock": 0}
    return IterationStats(
        timestamp=raw["timestamp"] if isinstance(raw.get("timestamp"), float) else 0.0,
        iteration=_int(raw, "iter"),
        iter_latency_ms=float(raw.get("iterLatencyMS") or 0.0),
        num_active_requests=_int(raw, "numActiveRequests"),
        num_queued_requests=_int(raw, "numQueuedRequests"),
        num_completed_requests=_int(raw, "numCompletedRequests"),
        max_num_active_requests=_int(raw, "maxNumActiveRequests"),
        kv_cache_stats=msgspec.convert(blank | _set(cache), KvCacheStats, strict=False),
        inflight_batching_stats=msgspec.convert(
            _set(raw.get("inflightBatchingStats") or {}), InflightBatchingStats, strict=False
        ),
    )


def kv_capacity(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """KV blocks and the tokens in one; None if the statistics do not tell. Raises EngineFailure for a cache that holds nothing."""
    cache = raw.get("kvCacheStats") or {}
    blocks, size = cache.get("maxNumBlocks"), cache.get("tokensPerBlock")
    if blocks is None or size is None:
        return None
    if blocks <= 0 or size <= 0:
        raise EngineFailure(
            f"the engine has a KV cache of {blocks} blocks of {size} tokens: no memory is left for it. Raise "
            "kv_cache_config.free_gpu_memory_fraction, spread the model over more GPUs, or free what else is on them"
        )
    return int(blocks), int(size)


def _int(raw: Mapping[str, Any], key: str) -> int:
    return int(raw.get(key) or 0)


def _set(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _unsigned(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _unsigned(child, name) for name, child in value.items()}
    if isinstance(value, list):
        return [_unsigned(child, key) for child in value]
    if key in ("block_hash", "parent_hash", "block_hashes") and isinstance(value, int):
        return value % (1 << 64)
    return value
