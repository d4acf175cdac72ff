"""Asks TensorRT-LLM again and again for its KV-cache events and statistics, with pauses that grow while there is nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.kv_events import KvEvent
from engine.stats import IterationStats
from engine.trtllm.events import iteration_stats, kv_event

BATCH = 256
EVENT_PAUSES = (0.005, 0.020, 1.5)
"""Seconds after an empty drain: the shortest, the longest, and the factor from one to the next."""
STATS_PAUSES = (0.010, 0.100, 2.0)
_WAIT_SECONDS = 0.5

log = logging.getLogger(__name__)


async def poll_kv_events(llm: Any, put: Callable[[KvEvent], None]) -> None:
    """Pass on every event, for as long as this runs."""
    pause = _Pause(*EVENT_PAUSES)
    while True:
        batch = await _drain(llm.get_kv_cache_events_async, "KV-cache events")
        for raw in batch:
            if (event := kv_event(raw)) is not None:
                put(event)
        await pause.after(batch)


async def poll_stats(llm: Any, publish: Callable[[IterationStats], None]) -> None:
    """Publish the newest statistics whenever there are new ones."""
    pause = _Pause(*STATS_PAUSES)
    while True:
        batch = await _drain(llm.get_stats_async, "statistics")
        if batch:
            publish(iteration_stats(batch[-1]))
        await pause.after(batch)


async def _drain(call: Callable[..., AsyncIterator[dict[str, Any]]], what: str) -> list[dict[str, Any]]:
    """What is there, at most a batch. A failed poll costs what it has not delivered yet, and nothing else.

    1.2.1 can fail while it serialises a change of one of two properties (AttributeError) and before the first request (AssertionError).
    """
    batch: list[dict[str, Any]] = []
    try:
        async for raw in call(timeout=_WAIT_SECONDS):
            batch.append(raw)
            if len(batch) == BATCH:
                break
    except (AssertionError, AttributeError) as error:
        log.warning("a poll of the engine's %s failed: %s", what, error)
    except RuntimeError as error:  # the executor has shut down; who watches its health says so
        log.debug("no %s: %s", what, error)
    return batch


class _Pause:
    def __init__(self, shortest: float, longest: float, factor: float) -> None:
        self._shortest, self._longest, self._factor = shortest, longest, factor
        self._next = shortest

    async def after(self, batch: list[dict[str, Any]]) -> None:
        if batch:
            self._next = self._shortest
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._next)
            self._next = min(self._longest, self._next * self._factor)
