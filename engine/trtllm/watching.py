"""Watches TensorRT-LLM from a thread, so that this works even if it blocks the event loop.

1.2.1 notices neither a worker process that is killed nor one that hangs: requests stay unanswered, and
`_check_health` stays true. After a background error it shuts the executor down in the calling thread, and waits there
for every worker without a limit. Then only the end of the process, and of its workers, leads to another one.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from engine.process import tree
from engine.trtllm import library

HEALTH_SECONDS = 1.0
"""Interval of the checks."""
BLOCKED_SECONDS = 10.0
"""Time the event loop may take to notice that the engine has died, before the process is ended."""
WORKER = "mpi4py.futures.server"
"""Module that the workers of an MPI pool run, even a single one. Those of trtllm-llmapi-launch are not below us."""

log = logging.getLogger(__name__)


class Watch:
    """Checks the workers from construction on, and after `follow` the executor and its progress too.

    `hang_seconds` is the time for which it may owe an answer without making progress; 0 is without a limit.
    """

    def __init__(self, hang_seconds: float) -> None:
        self.broken = False
        """Whether a worker has ended or hangs, so that shutting down would never end."""
        self._hang_seconds = hang_seconds
        self._silent_seconds = 0.0
        self._loop = asyncio.get_running_loop()
        self._workers: set[tree.RunningProcess] = set()
        self._llm: Any = None
        self._owes: Callable[[], bool] = lambda: False
        self._die: Callable[[str], None]
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name="trtllm-watch", daemon=True).start()

    def follow(self, llm: Any, owes: Callable[[], bool], die: Callable[[str], None]) -> None:
        """Begin to check the loaded engine.

        `owes` says, in the thread, whether an answer is due. `die` gets the reason on the event loop.
        """
        self._owes = owes
        self._die = die
        self._find_workers()
        self._llm = llm

    def progress(self) -> None:
        """Note that the engine has made progress."""
        self._silent_seconds = 0.0

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(HEALTH_SECONDS):
            if reason := self._fault():
                self._report(reason)
                return

    def _fault(self) -> str:
        """Return the fault; empty without one."""
        llm = self._llm
        if llm is None:
            self._find_workers()
        if ended := [worker.pid for worker in self._workers if not tree.runs(worker)]:
            self.broken = True
            return f"the engine died: its worker process {ended[0]} has ended"
        if llm is None:
            return ""
        if not library.is_alive(llm):
            return "the engine has shut itself down"
        # Passes are counted instead of time, of which a suspended machine or container loses any amount.
        self._silent_seconds = self._silent_seconds + HEALTH_SECONDS if self._owes() else 0.0
        if self._hang_seconds and self._silent_seconds > self._hang_seconds:
            self.broken = True
            return f"the engine died: it has made no progress for {self._hang_seconds:g} s"
        return ""

    def _find_workers(self) -> None:
        self._workers |= {below for below in tree.descendants(os.getpid()) if WORKER in tree.command(below)}

    def _report(self, reason: str) -> None:
        """Have the event loop end the engine, or end the process if it does not react.

        While it loads, the loop is blocked; TensorRT-LLM may still find out by itself why a worker has ended.
        """
        noticed = threading.Event()

        def die() -> None:
            noticed.set()
            self._die(reason)

        if self._llm is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(die)
            noticed.wait(BLOCKED_SECONDS)
        if noticed.is_set() or self._stopping.wait(0.0 if self._llm is not None else BLOCKED_SECONDS):
            return
        log.critical("%s, and blocks the event loop: ending the process", reason)
        tree.kill(tree.own_mark())
        os._exit(1)
