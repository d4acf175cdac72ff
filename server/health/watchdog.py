"""A thread that detects a blocked event loop and logs every thread's stack."""

import asyncio
import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_PARTS = 10
"""Number of heartbeats, and of checks of the latest one, in the allowed time."""

log = logging.getLogger(__name__)


class Watchdog:
    """Detects within `seconds` that the event loop is blocked; logs the stacks of all threads, once for each block.

    `report` is called in the watchdog's thread, with True and, once the loop runs again, with False.
    """

    def __init__(self, seconds: float, report: Callable[[bool], None]) -> None:
        self._pause = seconds / _PARTS
        self._allowed = seconds - 2 * self._pause
        self._report = report
        self._beat = 0.0
        self._stopped = threading.Event()
        self.blocked = False

    def reason(self) -> str:
        """Return why the replica is not ready; empty if the loop runs. Only seen right after a block: during one, nothing
        answers.
        """
        return "The event loop stood still." if self.blocked else ""

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running event loop during the block."""
        self._beat = time.monotonic()
        beating = asyncio.create_task(self._beats(), name="watchdog")
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            beating.cancel()
            await asyncio.wait([beating])
            thread.join()

    async def _beats(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(self._pause)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stopped.wait(self._pause):
            now = time.monotonic()
            stopped, looked = now - looked > 3 * self._pause, now
            if stopped:  # the whole process was stopped, and the loop with it
                self._beat = max(self._beat, now)
            late = now - self._beat > self._allowed
            if late and not self.blocked:
                log.error("the event loop has been blocked for %.1f s:\n%s", now - self._beat, stacks())
            if late != self.blocked:
                self.blocked = late
                self._report(late)
                if not late:
                    log.warning("the event loop runs again")


def stacks() -> str:
    """Return the stack of every thread of this process."""
    with tempfile.TemporaryFile("w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
