"""The queue in front of an engine: no more sequences inside than it runs at once, the others in order, within bounds of number and time."""

import asyncio
import contextvars
import heapq
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Self

import msgspec

from engine.base import DeltaIterator, Engine
from engine.errors import EngineNotReady, QueueFull, QueueTimeout
from engine.kit.priority import rank
from engine.kit.stream import DeltaStream
from engine.kv_events import KvEvent
from engine.process.attachments import data_of
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo, GenerateRequest, PromptReport

MOST_WAITING_BYTES = 4 << 30
"""Bytes of images, or of their embeddings, that requests in the queue may hold."""


class AdmissionEngine:
    """An engine around `engine` that lets at most `engine.info.max_num_seqs` sequences in.

    Further ones wait, in order of priority and arrival. With `max_queue_size` waiting, or MOST_WAITING_BYTES of images, the next
    one raises QueueFull; one that waited `queue_timeout` seconds raises QueueTimeout. The wait counts in `PromptReport.queue_seconds`.
    """

    def __init__(self, engine: Engine, max_queue_size: int, queue_timeout: float) -> None:
        self._engine = engine
        self._max_queue_size = max_queue_size
        self._queue_timeout = queue_timeout
        self._inside = 0
        self._queue: dict[_AdmittedStream, int] = {}
        """The bytes of images of each."""
        self._waiting_bytes = 0
        self._order: list[tuple[float, int, _AdmittedStream]] = []
        self._arrivals = itertools.count()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def healthy(self) -> bool:
        return self._engine.healthy

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    async def start(self) -> None:
        await self._engine.start()

    def generate(self, request: GenerateRequest) -> DeltaIterator:
        try:
            capacity = self._engine.info.max_num_seqs
        except EngineNotReady as error:
            return DeltaStream.failed(error)
        stream = _AdmittedStream(self, self._engine, request)
        if self._inside < capacity:
            self._admit(stream)
        elif len(self._queue) >= self._max_queue_size:
            return DeltaStream.failed(QueueFull(f"{len(self._queue)} sequences wait for the engine already"))
        elif (size := sum(map(len, data_of(request)))) and self._waiting_bytes + size > MOST_WAITING_BYTES:
            return DeltaStream.failed(
                QueueFull(f"sequences with {self._waiting_bytes} bytes of images wait for the engine already")
            )
        else:
            self._queue[stream] = size
            self._waiting_bytes += size
            heapq.heappush(self._order, (rank(request.priority, time.monotonic()), next(self._arrivals), stream))
            stream.wait(self._queue_timeout)
        return stream

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self._engine.kv_events()

    def stats(self) -> AsyncIterator[IterationStats]:
        return self._engine.stats()

    async def close(self) -> None:
        for stream in list(self._queue):
            self.leave(stream)
            stream.refuse(EngineNotReady("the engine is closing"))
        await self._engine.close()

    def leave(self, stream: "_AdmittedStream") -> None:
        """Take `stream` out of the queue."""
        self._waiting_bytes -= self._queue.pop(stream)
        if len(self._order) > 2 * len(self._queue):
            self._order = [entry for entry in self._order if entry[2] in self._queue]
            heapq.heapify(self._order)

    def _admit(self, stream: "_AdmittedStream") -> None:
        self._inside += 1
        stream.admit().when_done(self._release)

    def _release(self) -> None:
        """A sequence has left the engine: let in the first that waits."""
        self._inside -= 1
        while self._queue:
            stream = heapq.heappop(self._order)[2]
            if stream in self._queue:
                self._waiting_bytes -= self._queue.pop(stream)
                self._admit(stream)
                return


class _AdmittedStream:
    """The deltas of one request, which may have to wait in the queue before they begin."""

    def __init__(self, admission: AdmissionEngine, engine: Engine, request: GenerateRequest) -> None:
        self._admission = admission
        self._engine = engine
        self._request = request
        self._context = contextvars.copy_context()  # whoever lets it in does so from another request's
        self._arrived = time.monotonic()
        self._queue_seconds = 0.0
        self._inner: DeltaIterator | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._called = asyncio.Event()
        self._callbacks: list[Callable[[], object]] = []

    def wait(self, timeout: float) -> None:
        """Begin to wait, `timeout` seconds at most."""
        self._timeout = asyncio.get_running_loop().call_later(timeout, self._give_up)

    def admit(self) -> DeltaIterator:
        """Enter the engine."""
        self._queue_seconds = time.monotonic() - self._arrived
        return self._go_on(self._context.run(self._engine.generate, self._request))

    def refuse(self, error: Exception) -> None:
        """End with `error`; the stream has left the queue."""
        self._go_on(DeltaStream.failed(error))

    def when_done(self, callback: Callable[[], object]) -> None:
        if self._inner is None:
            self._callbacks.append(callback)
        else:
            self._inner.when_done(callback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._inner is None:
            try:
                await self._called.wait()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        assert self._inner is not None
        delta = await anext(self._inner)
        return self._with_wait(delta, delta.prompt) if delta.prompt is not None else delta

    async def aclose(self) -> None:
        if self._inner is None:
            self._admission.leave(self)
            self._go_on(DeltaStream(lambda: None))
        assert self._inner is not None
        await self._inner.aclose()

    def _with_wait(self, delta: Delta, prompt: PromptReport) -> Delta:
        prompt = msgspec.structs.replace(prompt, queue_seconds=prompt.queue_seconds + self._queue_seconds)
        return msgspec.structs.replace(delta, prompt=prompt)

    def _go_on(self, inner: DeltaIterator) -> DeltaIterator:
        """Stop waiting: what comes now comes from `inner`."""
        if self._timeout is not None:
            self._timeout.cancel()
        self._inner = inner
        self._called.set()
        for callback in self._callbacks:
            inner.when_done(callback)
        return inner

    def _give_up(self) -> None:
        self._admission.leave(self)
        self.refuse(QueueTimeout(f"the request waited {time.monotonic() - self._arrived:.1f} s for its turn"))
