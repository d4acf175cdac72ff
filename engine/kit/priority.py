"""Work that runs only where the others leave a core idle."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.kit.tasks import in_thread

_NORMAL, _LOWEST = 0, 19
"""Nice values."""
_SESSION = Path("/proc/self/autogroup")
"""Nice value of this process's session: Linux may weigh sessions before it weighs threads (sched(7), "The autogroup
feature")."""
_PAUSE_SECONDS = 0.1
"""The system takes values of sessions no more often."""

log = logging.getLogger(__name__)


async def give_way(work: Callable[[], None]) -> None:
    """Call `work` in a thread of the lowest priority. Threads that it starts, such as those of numpy, keep that.

    A process that leads a session gives way as a whole, until `work` returns.
    """

    def run() -> None:
        if sys.platform == "linux":  # elsewhere the id may be that of another process
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        lowered = os.getsid(0) == os.getpid() and _weigh_session(_LOWEST)
        try:
            work()
        finally:
            if lowered and not _weigh_session(_NORMAL):
                log.warning("the session of this process keeps the lowest priority: %s cannot be written", _SESSION)

    await in_thread(run)


def _weigh_session(nice: int) -> bool:
    """Set the session's value; return whether this system has one."""
    while True:
        try:
            _SESSION.write_text(str(nice))
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
        except OSError:
            return False
        else:
            return True
