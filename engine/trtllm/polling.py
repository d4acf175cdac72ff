"""Asks TensorRT-LLM again and again for its KV-cache events and statistics, with pauses that grow while there is nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.kv_events import KvEvent
from engine.stats import IterationStats
from engine.trtllm.events import iteration_stats, kv_event

EVENT_PAUSES = (0.005, 0.020, 1.5)
"""Seconds after a poll that brought nothing: the shortest, the longest, and the factor from one to the next."""
STATS_PAUSES = (0.010, 0.100, 2.0)
_WAIT_SECONDS = 0.5

log = logging.getLogger(__name__)


async def poll_kv_events(llm: Any, put: Callable[[KvEvent], None]) -> None:
    """Pass on every event as it comes, for as long as this runs."""

    def handle(raw: dict[str, Any]) -> None:
        if (event := kv_event(raw)) is not None:
            put(event)

    await _poll(llm.get_kv_cache_events_async, handle, EVENT_PAUSES, "KV-cache events")


async def poll_stats(llm: Any, publish: Callable[[IterationStats], None]) -> None:
    """Publish the statistics of every step."""
    await _poll(llm.get_stats_async, lambda raw: publish(iteration_stats(raw)), STATS_PAUSES, "statistics")


async def _poll(
    call: Callable[..., AsyncIterator[dict[str, Any]]],
    handle: Callable[[dict[str, Any]], None],
    pauses: tuple[float, float, float],
    what: str,
) -> None:
    """A poll lasts until nothing has come for a while, which ends it without an error. A failed one costs what it had still to deliver.

    1.2.1 can fail while it serialises a change of one of two properties (AttributeError) and before the first request (AssertionError).
    """
    pause, longest, factor = pauses
    while True:
        found = False
        try:
            async for raw in call(timeout=_WAIT_SECONDS):
                found = True
                handle(raw)
        except (AssertionError, AttributeError) as error:
            log.warning("a poll of the engine's %s failed: %s", what, error)
        except RuntimeError as error:  # the executor has shut down; who watches its health says so
            log.debug("no %s: %s", what, error)
        pause = pauses[0] if found else min(longest, pause * factor)
        await asyncio.sleep(pause)
