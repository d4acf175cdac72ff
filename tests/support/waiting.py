"""Wait, with a deadline, for conditions that have no event; allow for machines that are slow for a while."""

import asyncio
import time
from collections.abc import Callable

_LOOP_SECONDS = 0.045
"""Wall-clock time of `slowness`'s loop on one quiet core of the machines that run this suite."""


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return as soon as `condition` holds. Raises TimeoutError if it does not hold in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a helper for what has no event
            await asyncio.sleep(0.005)


def slowness() -> float:
    """How many times longer than usual Python takes here now, at least 1: upper bounds of time are multiplied by it.

    Call it next to what is measured. It counts a busy neighbour as well as a slow core, and takes about 45 ms itself.
    """
    began = time.perf_counter()
    total = 0
    for number in range(500_000):
        total += number
    return max(1.0, (time.perf_counter() - began) / _LOOP_SECONDS)
