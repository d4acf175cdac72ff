"""Work that runs only where the others leave a core idle."""

import contextlib
import os
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
_ATTEMPTS = 50
_PAUSE_SECONDS = 0.1
"""The system takes a session's value at most that often."""


async def give_way(work: Callable[[], None]) -> None:
    """Call `work` in a thread of the lowest priority, which the threads that it starts keep.

    A process that leads a session gives way as a whole, until `work` returns.
    """

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        if os.getsid(0) != os.getpid():
            return work()
        _weigh_session(_LOWEST)
        try:
            work()
        finally:
            _weigh_session(_NORMAL)

    await in_thread(run)


def _weigh_session(nice: int) -> None:
    """Set the session's value, if this system has one."""
    for _ in range(_ATTEMPTS):
        try:
            _SESSION.write_text(str(nice))
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
        except OSError:
            return
        else:
            return
