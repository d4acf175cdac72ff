"""Iteration statistics and KV-cache events: kept until they are read, in the documented JSON shapes."""

import asyncio
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any, Self

import msgspec

from engine.kv_events import KvEvent
from engine.stats import IterationStats
from tensorrt_llm._contract import API
from tensorrt_llm._test import faults

_STATS = API["json_schemas"]["iteration_stats"]
_OBJECTS = ("kvCacheStats", "staticBatchingStats", "inflightBatchingStats", "specDecodingStats")


class Buffer:
    """Items from the executor's thread, at most `limit`: the oldest are lost first."""

    def __init__(self, limit: int) -> None:
        self._items: deque[dict[str, Any]] = deque(maxlen=limit)
        self._changed = threading.Condition()
        self._reader: IterationResult | None = None

    def put(self, item: dict[str, Any]) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
        if self._reader is not None:
            self._reader.wake()

    def pop(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """The oldest item; None if there is none for `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._items, timeout)
            return self._items.popleft() if self._items else None

    def reader(self, event_poll: bool) -> "IterationResult":
        self._reader = IterationResult(self, event_poll)
        return self._reader


class IterationResult:
    """Yield items, removing each as it is read, until there is none for the timeout.

    It is asynchronous only if a loop was running when it was made.
    """

    def __init__(self, buffer: Buffer, event_poll: bool = False) -> None:
        self._buffer = buffer
        self._event_poll = event_poll
        self._timeout = 2.0
        self._done = False
        self._ready: asyncio.Event | None = None
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._ready = asyncio.Event()

    def set_timeout(self, timeout: float) -> None:
        self._timeout = timeout if faults.longest_poll_seconds is None else min(timeout, faults.longest_poll_seconds)

    def mark_undone(self) -> None:
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        self._strike()
        items = []
        while (item := self._buffer.pop(self._timeout)) is not None:
            items.append(item)
        return items

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        assert self._ready is not None, (
            "The asyncio event loop was not present during initialization, so async operations are not available."
        )
        self._strike()
        if self._done:
            raise StopAsyncIteration
        while (item := self._buffer.pop()) is None:
            self._ready.clear()
            try:
                await asyncio.wait_for(self._ready.wait(), self._timeout)
            except TimeoutError:
                self._done = True
                raise StopAsyncIteration from None
        return item

    def wake(self) -> None:
        """Called from the executor's thread."""
        if self._ready is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)

    def _strike(self) -> None:
        if self._event_poll and (message := faults.take("event_poll_error")):
            raise AttributeError(message)


def event_item(event: KvEvent) -> dict[str, Any]:
    """A KV event in the shape of `KVCacheEventSerializer`."""
    item: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(event))
    return item


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
