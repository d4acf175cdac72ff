"""An engine whose core runs in a thread of its own: the event loop talks to it through a queue."""

import asyncio
import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from engine.base import DeltaStream, Latest
from engine.config import EmbeddedConfig
from engine.errors import EngineDied, EngineError, EngineFailure, EngineNotReady, EngineUnavailable
from engine.kit.kv_log import KvEventLog
from engine.kv_events import KvEvent
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo

Core = TypeVar("Core")
T = TypeVar("T")
log = logging.getLogger(__name__)


class ThreadedEngine(ABC, Generic[Core]):
    """The part of an `Engine` that starts the thread, sends commands to the core, and delivers its outputs."""

    def __init__(self, config: EmbeddedConfig) -> None:
        self._config = config
        self._info: EngineInfo | None = None
        self._commands: queue.SimpleQueue[Callable[[Core], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, DeltaStream] = {}
        self._stats: Latest[IterationStats] = Latest()
        self._events = KvEventLog()
        self._asked: set[asyncio.Future[Any]] = set()
        """Results of calls in the engine's thread that have not returned yet."""
        self._thread: threading.Thread | None = None
        self._lost = False
        """Whether a step has failed so that none can follow; the thread goes on until it has closed its resources."""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineNotReady("the engine has not started")
        return self._info

    @property
    def healthy(self) -> bool:
        return self._info is not None and not self._lost and self._thread is not None and self._thread.is_alive()

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self._events.batches()

    def stats(self) -> AsyncIterator[IterationStats]:
        return self._stats.values()

    def sleep_obstacle(self, level: int) -> str:
        return ""

    async def close(self) -> None:
        if self._thread is not None:
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)
            self._fail_all(EngineNotReady("the engine is closing"))
        self._info = None
        self._stats.close()
        self._events.close()

    def _start_thread(self, run: Callable[..., None], *arguments: object) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=run, args=arguments, name="engine", daemon=True)
        self._thread.start()

    async def _ask(self, function: Callable[[Core], T]) -> T:
        """Call a function in the engine's thread, and return its result.

        Raises EngineNotReady, and the function's EngineFailure.
        """
        if not self.healthy:
            raise EngineNotReady("the engine is not running")
        done: asyncio.Future[T] = self._loop.create_future()
        self._asked.add(done)
        done.add_done_callback(self._asked.discard)

        def answer(core: Core) -> None:
            try:
                self._settle(done, function(core))
            except EngineFailure as error:
                self._settle(done, error)

        self._commands.put(answer)
        return await done

    # The engine thread.

    def _fail_start(self, awaited: "asyncio.Future[T]", error: Exception) -> None:
        """Have the start raise an EngineFailure for whatever error prevents it; it would wait forever otherwise."""
        if not isinstance(error, EngineFailure):  # a bug, or a library's
            log.error("cannot load %s", self._config.model, exc_info=error)
            said = " ".join(f"{type(error).__name__}: {error}".split())
            error = EngineFailure(f"cannot load {self._config.model}: {said}")
        self._settle(awaited, error)

    def _run_steps(self, core: Core, resources: AbstractContextManager[object]) -> None:
        """Run steps until told to stop. Requests hear of an error after `resources` are closed: then nobody reads the
        core's memory any more.
        """
        try:
            with resources:
                try:
                    with torch.inference_mode():
                        while self._obey(core):
                            self._step(core)
                except Exception as error:  # a bug of ours: the engine is lost, its requests must not hang
                    self._lost = True
                    log.critical("the engine thread died", exc_info=error)
        finally:
            if self._lost:
                self._call(self._fail_all, EngineDied("the engine died"))

    @abstractmethod
    def _obey(self, core: Core) -> bool:
        """Carry out queued commands, and wait for one while there is nothing to do. Return False when told to stop."""

    @abstractmethod
    def _step(self, core: Core) -> None:
        """Run a step, and have its outputs delivered."""

    def _settle(self, future: "asyncio.Future[T]", outcome: T | EngineFailure) -> None:
        """Give a result or an error to a future of the event loop."""
        self._call(_settle, future, outcome)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, unless the loop has been closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    # Back on the event loop.

    def _deliver(
        self,
        outputs: Iterable[tuple[str, Delta | EngineError]],
        stats: IterationStats,
        events: Sequence[KvEvent] = (),
    ) -> None:
        self._stats.publish(stats)
        for event in events:
            self._events.put(event)
        for request_id, output in outputs:
            if (stream := self._streams.get(request_id)) is None:
                continue
            if isinstance(output, Delta):
                stream.put(output)
                continue
            if isinstance(output, EngineFailure):
                log.error("request %s failed in the engine", request_id, exc_info=output.__cause__)
            stream.fail(output)

    def _fail_all(self, error: EngineUnavailable) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(error)


def _settle(future: "asyncio.Future[T]", outcome: T | EngineFailure) -> None:
    """Set the outcome of a future, unless it was cancelled meanwhile."""
    if future.done():
        return
    if isinstance(outcome, EngineFailure):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
