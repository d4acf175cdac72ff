"""Restarts a child process when it ends, after pauses that grow."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
HEALTHY_SECONDS = 10.0
"""Time a process must have served to be restarted at once."""

log = logging.getLogger(__name__)


class End(NamedTuple):
    """The end of one run of a process."""

    reason: str
    served_seconds: float = 0.0
    """Seconds for which the process served; 0 if it never did."""
    final: bool = False
    """Whether the process is not to be restarted."""
    prepared: bool = False
    """Whether a standby process is prepared, which takes longer than a pause."""


class Supervisor:
    """Calls `live`, which starts a process and returns when it has ended, again and again.

    After a process that has served for HEALTHY_SECONDS the next one starts at once, and so does one that is prepared.
    After others this pauses, first for FIRST_PAUSE seconds, then each time twice as long, up to LONGEST_PAUSE.
    """

    def __init__(self, live: Callable[[], Awaitable[End]]) -> None:
        self._live = live
        self._pause = FIRST_PAUSE
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Start no other process; `run` returns once the current one has ended."""
        self._stopped.set()

    async def run(self) -> str:
        """Return the reason of the last end: one that is final, or the first after `stop`. May be cancelled."""
        while True:
            end = await self._live()
            if end.final or self._stopped.is_set():
                return end.reason
            reason = end.reason.partition("\n")[0]  # its log was passed on
            if end.served_seconds > HEALTHY_SECONDS:
                self._pause = FIRST_PAUSE
            if end.prepared or end.served_seconds > HEALTHY_SECONDS:
                log.error("restarting at once: %s", reason)
                continue
            log.error("restarting in %.2g s: %s", self._pause, reason)
            try:
                async with asyncio.timeout(self._pause):
                    await self._stopped.wait()
                return end.reason
            except TimeoutError:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
