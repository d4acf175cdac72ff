"""Asks TensorRT-LLM again and again for its KV-cache events and statistics, with pauses that grow while there is nothing."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from engine.kv_events import KvEvent
from engine.stats import IterationStats
from engine.trtllm.events import iteration_stats, kv_event

EVENT_PAUSES = (0.005, 0.020, 1.5)
"""Seconds after a poll that brought nothing: the shortest, the longest, and the factor from one to the next."""
STATS_PAUSES = (0.010, 0.100, 2.0)
_WAIT_SECONDS = 0.5

T = TypeVar("T")
log = logging.getLogger(__name__)


async def poll_kv_events(llm: Any, put: Callable[[KvEvent], None]) -> None:
    """Pass on every event as it comes, for as long as this runs."""
    await _poll(llm.get_kv_cache_events_async, kv_event, put, EVENT_PAUSES, Mishaps("KV-cache events"))


async def poll_stats(llm: Any, publish: Callable[[IterationStats], None]) -> None:
    """Publish the statistics of every step."""
    await _poll(llm.get_stats_async, iteration_stats, publish, STATS_PAUSES, Mishaps("statistics"))


class Mishaps:
    """What went wrong in one poller, by kind: said at the 1st, 10th, 100th … time, since a kind that comes once mostly comes often."""

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


async def _poll(
    call: Callable[..., AsyncIterator[dict[str, Any]]],
    convert: Callable[[dict[str, Any]], T],
    put: Callable[[T], None],
    pauses: tuple[float, float, float],
    mishaps: Mishaps,
) -> None:
    """A poll lasts until nothing has come for a while, which ends it without an error. A failed one costs what it had still to deliver, an
    item that cannot be read itself alone; nothing ends the polling.

    1.2.1 can fail while it serialises a change of one of two properties (AttributeError) and before the first request (AssertionError);
    once its executor has shut down every poll fails (RuntimeError), and who watches its health says so.
    """
    pause, longest, factor = pauses
    while True:
        found = False
        try:
            async for raw in call(timeout=_WAIT_SECONDS):
                found = True
                try:
                    item = convert(raw)
                except Exception as error:
                    mishaps.note("an item", error)
                else:
                    put(item)
        except Exception as error:
            mishaps.note("a poll", error)
        pause = pauses[0] if found else min(longest, pause * factor)
        await asyncio.sleep(pause)
