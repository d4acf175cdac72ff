"""A thread that detects a blocked event loop and logs where it stands."""

import asyncio
import faulthandler
import logging
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_PARTS = 10
"""Number of heartbeats, and of checks of the newest heartbeat, within the allowed time."""

log = logging.getLogger(__name__)


class Watchdog:
    """Detects within `seconds` that the event loop is blocked; logs all stacks, its own first, once for each block.

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
        """Return why the replica is not ready, or "". It is visible only after a block, since nothing answers during
        one."""
        return "The event loop stood still." if self.blocked else ""

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running event loop during the block."""
        self._beat = time.monotonic()
        loop_thread = threading.get_ident()
        beating = asyncio.create_task(self._beats(), name="watchdog")
        thread = threading.Thread(target=self._watch, args=(loop_thread,), name="watchdog", daemon=True)
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

    def _watch(self, loop_thread: int) -> None:
        looked = time.monotonic()
        while not self._stopped.wait(self._pause):
            now = time.monotonic()
            stopped, looked = now - looked > 3 * self._pause, now
            if stopped:  # the whole process was stopped, and the loop with it
                self._beat = max(self._beat, now)
            late = now - self._beat > self._allowed
            if late and not self.blocked:
                standing = "".join(traceback.format_stack(sys._current_frames().get(loop_thread)))
                log.error(
                    "the event loop has been blocked for %.1f s:\n%s\nAll threads:\n%s",
                    now - self._beat,
                    standing,
                    stacks(),
                )
            if late != self.blocked:
                self.blocked = late
                self._report(late)
                if not late:
                    log.warning("the event loop runs again")


def stacks() -> str:
    """Return the stacks of the threads of this process, at most 100."""
    with tempfile.TemporaryFile("w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
