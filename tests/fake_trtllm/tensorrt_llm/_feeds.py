"""Iteration statistics and KV-cache events: kept until they are read, in the documented JSON shapes."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Self

import msgspec

from engine.kv_events import KvEvent
from engine.stats import IterationStats
from tensorrt_llm._contract import API, NEWEST
from tensorrt_llm._test import faults
from tensorrt_llm._vision import TOKENS, image_token_of

_STATS = API["json_schemas"]["iteration_stats"]
_OBJECTS = ("kvCacheStats", "staticBatchingStats", "inflightBatchingStats", "specDecodingStats")


class Buffer:
    """Items from the executor's thread, at most `limit`: the oldest are lost first."""

    def __init__(self, limit: int) -> None:
        self._items: deque[dict[str, Any]] = deque(maxlen=limit)
        self._changed = threading.Condition()

    def put(self, item: dict[str, Any]) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def fetch(self, timeout: float) -> list[dict[str, Any]]:
        """All items. Blocks the calling thread until there is one, for `timeout` seconds at most."""
        if faults.longest_poll_seconds is not None:
            timeout = min(timeout, faults.longest_poll_seconds)
        with self._changed:
            self._changed.wait_for(lambda: self._items, timeout)
            items = list(self._items)
            self._items.clear()
        return items


class IterationResult:
    """Yields items that were fetched already; main's fetches them when it is asked, in a thread.

    It is asynchronous only if a loop was running when it was made.
    """

    later: Callable[[], list[dict[str, Any]]] | None = None

    def __init__(self) -> None:
        self._items: deque[dict[str, Any]] = deque()
        try:
            asyncio.get_running_loop()
            self._is_async = True
        except RuntimeError:
            self._is_async = False

    def extend(self, items: list[dict[str, Any]]) -> Self:
        self._items.extend(items)
        return self

    def set_timeout(self, timeout: float) -> None:
        """Without effect here: what is to be waited for has been fetched before."""

    def mark_undone(self) -> None:
        """Without effect here, too."""

    def get_results(self) -> list[dict[str, Any]]:
        items = list(self._items)
        self._items.clear()
        return items

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        assert self._is_async, (
            "The asyncio event loop was not present during initialization, so async operations are not available."
        )
        if self.later is not None:
            later, self.later = self.later, None
            self._items.extend(await asyncio.to_thread(later))
        if not self._items:
            raise StopAsyncIteration
        return self._items.popleft()


def event_item(event: KvEvent, args: Any, vocab_size: int) -> dict[str, Any]:
    """A KV event in the shape of `KVCacheEventSerializer`, of the manager that `args` choose."""
    item: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(event))
    if NEWEST and args.kv_cache_config.use_kv_cache_manager_v2:
        item |= {
            "hash_algo": "v2_sha256",
            "layer_group_id": 0,
            "data": _of_v2(item["data"], vocab_size, image_token_of(args.model)),
        }
    return item


def _of_v2(data: dict[str, Any], vocab_size: int, image_token: int | None) -> dict[str, Any]:
    """Hashes are SHA-256 in hex. The first token of an image is its digest, and the others count from the
    vocabulary's size on (#13589, #18810); a key may have a UUID (#19529).
    """
    for name in ("block_hash", "parent_hash"):
        if data.get(name) is not None:
            data[name] = _sha256(data[name])
    if "block_hashes" in data:
        data["block_hashes"] = [_sha256(value) for value in data["block_hashes"]]
    for block in data.get("blocks", ()):
        block["block_hash"] = _sha256(block["block_hash"])
        left = iter(block["mm_keys"])
        place = TOKENS
        for token in block["tokens"]:
            place += 1
            if not block["mm_keys"] or token["token_id"] != image_token:
                place = TOKENS
                continue
            if place >= TOKENS:
                key = next(left)
                key["uuid"], place = key["hash"][:16], key["start_offset"]
            token["token_id"] = vocab_size + place if place else key["hash"]
    return data


def _sha256(value: int) -> str:
    return value.to_bytes(8).hex() + 48 * "0"


def stats_item(stats: IterationStats, args: Any) -> dict[str, Any]:
    """The statistics of an iteration under the keys of 1.2.1, without those that are our own."""
    known: dict[str, Any] = msgspec.to_builtins(stats)
    item = {
        key: known.get(key, None if key in _OBJECTS else 0) for key in _STATS if key not in {"requestStats", "notes"}
    }
    item["timestamp"] = datetime.fromtimestamp(stats.timestamp or time.time(), UTC).strftime("%m-%d-%Y %H:%M:%S.%f")
    item |= {key: args.max_batch_size for key in item if key.startswith("maxBatchSize")}
    item |= {key: args.max_num_tokens for key in item if key.startswith("maxNumTokens")}
    if args.enable_iter_req_stats:
        item["requestStats"] = []
    return item
