"""Wait, with a deadline, for conditions that have no event."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return as soon as `condition` holds. Raises TimeoutError if it does not hold in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a helper for what has no event
            await asyncio.sleep(0.005)
