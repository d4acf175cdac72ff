"""Grammar workers in fair turns.

Guides of one kind and about one size form a lane. Lanes take turns, and none occupies the last free worker. Nor do all
lanes together whose guides are slow to compile: where they occupied it before they were known to be slow, one of their
guides gives its worker up to a quick one and starts again later. So slow guides delay only others like them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from engine.embedded.grammar.client import GrammarWorker, WorkerKilledError
from engine.embedded.grammar.library import Setup
from engine.embedded.grammar.worker import Reply
from engine.errors import EngineFailure, EngineUnavailable
from engine.kit.work import FairQueue
from engine.types import Guide

log = logging.getLogger(__name__)

_MAX_WAITING = 256
_MAX_WAITING_BYTES = 64 << 20
_ATTEMPTS = 2
_SLOW_SECONDS = 0.5
"""A guide that occupies a worker for longer makes its lane a slow one ..."""
_SLOW_MEMORY_SECONDS = 60.0
"""... for this long."""

Lane = tuple[str, int]
_Turn = tuple[Guide, "asyncio.Future[GrammarWorker]"]


@dataclass(slots=True)
class _Run:
    """A compilation in a worker."""

    lane: Lane
    timer: asyncio.TimerHandle
    preempted: bool = False


class WorkerPool:
    """Up to `size` workers with one setup, each started when it is first needed."""

    def __init__(self, setup: Setup, size: int) -> None:
        self._workers = tuple(GrammarWorker(setup) for _ in range(size))
        self._idle = list(self._workers)
        self._waiting: FairQueue[Lane, _Turn] = FairQueue(remember=True)
        self._running: dict[GrammarWorker, _Run] = {}
        """The latest last."""
        self._slow_until: dict[Lane, float] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start a worker, so that the first guide does not wait for it."""
        if self._idle:
            await self._restart(self._idle.pop())

    async def compile(self, guide: Guide, timeout: float) -> Reply:
        """Return a worker's reply, after waiting for a turn; cancelling kills a compilation under way.

        `timeout` is in seconds, counted from when a worker starts on the guide. Raises what `GrammarWorker.compile`
        does, and EngineUnavailable if too many guides wait, or if workers are killed again and again.
        """
        lane = (guide.kind, len(guide.spec).bit_length())
        attempts = _ATTEMPTS
        while attempts:
            worker = await self._take(lane, guide)
            try:
                return await worker.compile(guide, timeout)
            except WorkerKilledError:
                attempts -= not self._running[worker].preempted
            finally:
                self._give(worker)
        raise EngineUnavailable("the process that compiles grammars was killed, perhaps for want of memory")

    async def close(self) -> None:
        """Kill the workers. Every compilation must have been cancelled."""
        self._closed = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _take(self, lane: Lane, guide: Guide) -> GrammarWorker:
        if (
            len(self._waiting) >= _MAX_WAITING
            or sum(len(other.spec) for other, _ in self._waiting) > _MAX_WAITING_BYTES
        ):
            raise EngineUnavailable("too many schemas, regular expressions and grammars wait to be compiled")
        given: asyncio.Future[GrammarWorker] = asyncio.get_running_loop().create_future()
        self._waiting.add(lane, (guide, given))
        self._assign()
        try:
            return await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self._give(given.result())
            else:
                self._waiting.remove(lane, (guide, given))
                self._assign()  # others may have waited behind it
            raise

    def _give(self, worker: GrammarWorker) -> None:
        self._running.pop(worker).timer.cancel()
        if worker.alive or self._closed:
            self._idle.append(worker)
        else:
            task = asyncio.create_task(self._restart(worker))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)
        self._assign()

    async def _restart(self, worker: GrammarWorker) -> None:
        try:
            await worker.start()
        except EngineFailure as error:
            log.warning("%s", error)  # the next guide that needs the worker fails with it
        self._idle.append(worker)
        self._assign()

    def _assign(self) -> None:
        """Hand idle workers to the lanes that wait."""
        while self._idle and not self._closed:
            # A turn that is done is one whose caller is just leaving.
            turns = (lane for lane, (_, given) in self._waiting.firsts() if not given.done() and self._may_run(lane))
            if (lane := next(turns, None)) is None:
                return
            _, given = self._waiting.take(lane)
            worker = self._idle.pop()
            timer = asyncio.get_running_loop().call_later(_SLOW_SECONDS, self._note_slow, lane)
            self._running[worker] = _Run(lane, timer)
            given.set_result(worker)
        self._preempt()

    def _may_run(self, lane: Lane) -> bool:
        """Return whether a worker is left to the others if the lane, and all slow ones if it is slow, take another."""
        lanes = [run.lane for run in self._running.values()]
        most = max(1, len(self._workers) - 1)
        return lanes.count(lane) < most and not (self._slow(lane) and sum(map(self._slow, lanes)) >= most)

    def _slow(self, lane: Lane) -> bool:
        return time.monotonic() < self._slow_until.get(lane, 0.0)

    def _note_slow(self, lane: Lane) -> None:
        self._slow_until[lane] = time.monotonic() + _SLOW_MEMORY_SECONDS
        self._preempt()

    def _preempt(self) -> None:
        """End the slow compilation that began last if slow guides occupy all of several workers while a quick one
        waits."""
        slow = [worker for worker, run in self._running.items() if self._slow(run.lane)]
        waits = any(not self._slow(lane) for lane, _ in self._waiting.firsts())
        if waits and len(slow) == len(self._workers) > 1 and not any(run.preempted for run in self._running.values()):
            self._running[slow[-1]].preempted = True
            slow[-1].kill()
