"""Grammar workers in fair turns.

Guides of one kind and about one size form a lane. Lanes take turns, and none occupies the last free worker, so that
guides which are slow to compile delay only others like them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque

from engine.embedded.grammar.client import GrammarWorker, WorkerKilledError
from engine.embedded.grammar.library import Setup
from engine.embedded.grammar.worker import Reply
from engine.errors import EngineFailure, EngineUnavailable
from engine.types import Guide

log = logging.getLogger(__name__)

_MAX_WAITING = 256
_MAX_WAITING_BYTES = 64 << 20
_ATTEMPTS = 2

Lane = tuple[str, int]
_Turn = tuple[Guide, "asyncio.Future[GrammarWorker]"]


class WorkerPool:
    """Up to `size` workers with one setup, each started when it is first needed."""

    def __init__(self, setup: Setup, size: int) -> None:
        self._workers = tuple(GrammarWorker(setup) for _ in range(size))
        self._idle = list(self._workers)
        self._waiting: OrderedDict[Lane, deque[_Turn]] = OrderedDict()
        """The lane first that had its last turn the longest ago."""
        self._running: Counter[Lane] = Counter()
        self._restarts: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the workers, so that the first guides do not wait for them."""
        workers, self._idle = self._idle, []
        await asyncio.gather(*map(self._restart, workers))

    async def compile(self, guide: Guide, timeout: float) -> Reply:
        """Return a worker's reply, after waiting for a turn; cancelling kills a compilation under way.

        `timeout` is in seconds, counted from when a worker starts on the guide. Raises what `GrammarWorker.compile`
        does, and EngineUnavailable if too many guides wait, or if workers are killed again and again.
        """
        lane = (guide.kind, len(guide.spec).bit_length())
        for _ in range(_ATTEMPTS):
            worker = await self._take(lane, guide)
            try:
                return await worker.compile(guide, timeout)
            except WorkerKilledError:
                continue
            finally:
                self._give(lane, worker)
        raise EngineUnavailable("the process that compiles grammars was killed, perhaps for want of memory")

    async def close(self) -> None:
        """Kill the workers. Every compilation must have been cancelled."""
        self._closed = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _take(self, lane: Lane, guide: Guide) -> GrammarWorker:
        waiting = [turn for turns in self._waiting.values() for turn in turns]
        if len(waiting) >= _MAX_WAITING or sum(len(other.spec) for other, _ in waiting) > _MAX_WAITING_BYTES:
            raise EngineUnavailable("too many schemas, regular expressions and grammars wait to be compiled")
        given: asyncio.Future[GrammarWorker] = asyncio.get_running_loop().create_future()
        turn = (guide, given)
        if lane not in self._waiting:
            self._waiting[lane] = deque()
            self._waiting.move_to_end(lane, last=False)
        self._waiting[lane].append(turn)
        self._assign()
        try:
            return await given
        except asyncio.CancelledError:
            if turn in self._waiting[lane]:
                self._waiting[lane].remove(turn)
            elif not given.cancelled():
                self._give(lane, given.result())
            raise

    def _give(self, lane: Lane, worker: GrammarWorker) -> None:
        self._running[lane] -= 1
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
        most = max(1, len(self._workers) - 1)
        while self._idle and not self._closed:
            lane = next((lane for lane, turns in self._waiting.items() if turns and self._running[lane] < most), None)
            if lane is None:
                break
            _, given = self._waiting[lane].popleft()
            if not given.done():  # else its caller is just leaving
                self._waiting.move_to_end(lane)
                self._running[lane] += 1
                given.set_result(self._idle.pop())
