"""TensorRT-LLM's KV-cache events and iteration statistics, dicts in their JSON shapes, as our types. Pure."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.kv_events import KvEvent
from engine.stats import InflightBatchingStats, IterationStats, KvCacheStats

log = logging.getLogger(__name__)


def kv_event(raw: Mapping[str, Any]) -> KvEvent | None:
    """The event, or None for what is none that we know. Hashes are taken as unsigned 64-bit, whichever way they are signed."""
    try:
        return msgspec.convert(_unsigned(raw), KvEvent)
    except msgspec.ValidationError as error:
        log.warning("a KV-cache event was left out: %s", error)
        return None


def iteration_stats(raw: Mapping[str, Any]) -> IterationStats:
    """Every key is optional there: what is missing is 0. The timestamp is the engine's text or number; ours is in seconds."""
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
        inflight_batching_stats=msgspec.convert(_set(raw.get("inflightBatchingStats") or {}), InflightBatchingStats, strict=False),
    )


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
