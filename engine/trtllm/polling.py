"""Polls TensorRT-LLM for KV-cache events and step statistics, and converts them from its JSON to our types.

Pauses between polls grow while there is nothing to read.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from engine.errors import EngineFailure
from engine.kv_events import KvEvent
from engine.stats import InflightBatchingStats, IterationStats, KvCacheStats

EVENT_PAUSES = (0.005, 0.020, 1.5)
"""Shortest and longest pause in seconds after a poll without results, and the factor by which pauses grow."""
STATS_PAUSES = (0.010, 0.100, 2.0)
_WAIT_SECONDS = 0.5
_BATCH = 100
"""Maximum number of items handed over without a pause of the event loop's other work."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class PollErrors:
    """Errors of one poller, counted by kind and logged at the 1st, 10th, 100th ... time, since most kinds recur."""

    def __init__(self, what: str) -> None:
        self.counts: Counter[str] = Counter()
        self._what = what

    def note(self, where: str, error: Exception) -> None:
        kind = f"{where}: {type(error).__name__}"
        self.counts[kind] += 1
        count = self.counts[kind]
        if str(count).strip("0") == "1":
            log.warning(
                "%s of the engine's %s failed, %d so far: %s: %s", where, self._what, count, type(error).__name__, error
            )


class Poller(Generic[T]):
    """A thread that polls until it is stopped, and hands over what it has converted on the event loop.

    1.2.1 blocks the calling thread for as long as a poll waits, in its asynchronous methods too (#9980).
    """

    def __init__(
        self,
        what: str,
        call: Callable[..., list[dict[str, Any]]],
        convert: Callable[[dict[str, Any]], T],
        put: Callable[[T], None],
        pauses: tuple[float, float, float],
    ) -> None:
        self._call = call
        self._convert = convert
        self._put = put
        self._pauses = pauses
        self._errors = PollErrors(what)
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"trtllm-{what.replace(' ', '-')}", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop, and wait for the poll in progress, but not for one that hangs."""
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, 2 * _WAIT_SECONDS)

    def _run(self) -> None:
        """Poll until stopped. No error ends the polling.

        A poll returns without an error if nothing has arrived for a while. A failed poll loses its items, an item that
        cannot be converted only itself. Events that 1.2.1's worker cannot serialise are lost without an error: the
        next event's id shows the gap.
        """
        pause, longest, factor = self._pauses
        while not self._stopping.wait(pause):
            items = self._poll()
            for start in range(0, len(items), _BATCH):
                try:
                    self._loop.call_soon_threadsafe(self._hand_over, items[start : start + _BATCH])
                except RuntimeError:  # the loop is closed
                    return
            pause = self._pauses[0] if items else min(longest, pause * factor)

    def _poll(self) -> list[T]:
        try:
            raws = self._call(timeout=_WAIT_SECONDS)
        except Exception as error:
            self._errors.note("a poll", error)
            return []
        items = []
        for raw in raws:
            try:
                items.append(self._convert(raw))
            except Exception as error:
                self._errors.note("an item", error)
        return items

    def _hand_over(self, items: list[T]) -> None:
        if not self._stopping.is_set():
            for item in items:
                self._put(item)


def kv_event_poller(llm: Any, put: Callable[[KvEvent], None]) -> Poller[KvEvent]:
    """Pass every event to `put` until stopped."""
    return Poller("KV-cache events", llm.get_kv_cache_events, kv_event, put, EVENT_PAUSES)


def stats_poller(llm: Any, publish: Callable[[IterationStats], None]) -> Poller[IterationStats]:
    """Publish the statistics of every step until stopped."""
    return Poller("statistics", llm.get_stats, iteration_stats, publish, STATS_PAUSES)


def kv_event(raw: Mapping[str, Any]) -> KvEvent:
    """Convert an event; hashes become unsigned 64-bit integers. Raises msgspec.ValidationError for unknown events.

    Main's KV cache manager V2 names blocks by SHA-256 in hex, of which the first 64 bits stay, and an image by a digest
    in the place of its first token. `mm_keys` say the same of images, so that token becomes 0.
    """
    return msgspec.convert(_unsigned(raw), KvEvent)


def iteration_stats(raw: Mapping[str, Any]) -> IterationStats:
    """Convert statistics. Missing keys count as 0; a timestamp that is not a number of seconds too.

    Raises AttributeError, msgspec.ValidationError, TypeError or ValueError for malformed statistics.
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
        attention_dp_rank=raw.get("attentionDpRank"),
        kv_cache_stats=msgspec.convert(blank | _set(cache), KvCacheStats, strict=False),
        inflight_batching_stats=msgspec.convert(
            _set(raw.get("inflightBatchingStats") or {}), InflightBatchingStats, strict=False
        ),
    )


def kv_capacity(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the number of KV blocks and tokens per block; None if not reported. Raises EngineFailure for no blocks."""
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
    if key in ("block_hash", "parent_hash", "block_hashes") and value is not None:
        return value % (1 << 64) if isinstance(value, int) else int(value[:16], 16)
    return 0 if key == "token_id" and isinstance(value, str) else value
