"""The queue in front of an engine.

It admits as many sequences as the engine runs at once, and bounds how many others wait, and for how long.
"""

import asyncio
import contextvars
import heapq
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from engine.base import Engine
from engine.errors import EngineNotReady, QueueFull, QueueTimeout
from engine.kit.priority import rank
from engine.kit.stream import DeltaStream
from engine.kv_events import KvEvent
from engine.process.attachments import data_of
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo, GenerateRequest

MOST_WAITING_BYTES = 4 << 30
"""Maximum bytes of images and image embeddings that queued requests may hold."""


class AdmissionEngine:
    """An engine around `engine` that admits at most `engine.info.max_num_seqs` sequences at once.

    Others wait, in order of priority and arrival. Once `max_queue_size` sequences or MOST_WAITING_BYTES of images wait,
    the next request raises QueueFull; one that has waited `queue_timeout` seconds raises QueueTimeout.
    `PromptReport.queue_seconds` includes the wait.
    """

    def __init__(self, engine: Engine, max_queue_size: int, queue_timeout: float) -> None:
        self._engine = engine
        self._max_queue_size = max_queue_size
        self._queue_timeout = queue_timeout
        self._inside = 0
        self._queue: dict[_Waiting, None] = {}
        self._waiting_bytes = 0
        self._order: list[tuple[float, int, _Waiting]] = []
        self._arrivals = itertools.count()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def healthy(self) -> bool:
        return self._engine.healthy

    @property
    def waiting(self) -> int:
        """Number of queued sequences."""
        return len(self._queue)

    async def start(self) -> None:
        await self._engine.start()

    def generate(self, request: GenerateRequest) -> DeltaStream:
        try:
            capacity = self._engine.info.max_num_seqs
        except EngineNotReady as error:
            return DeltaStream.failed(error)
        if self._inside < capacity:
            return self._admit(request)
        if len(self._queue) >= self._max_queue_size:
            return DeltaStream.failed(QueueFull(f"{len(self._queue)} sequences wait for the engine already"))
        size = sum(map(len, data_of(request)))
        if size and self._waiting_bytes + size > MOST_WAITING_BYTES:
            return DeltaStream.failed(
                QueueFull(f"sequences with {self._waiting_bytes} bytes of images wait for the engine already")
            )
        return self._enqueue(request, size)

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self._engine.kv_events()

    def stats(self) -> AsyncIterator[IterationStats]:
        return self._engine.stats()

    async def close(self) -> None:
        for waiting in list(self._queue):
            self._refuse(waiting, EngineNotReady("the engine is closing"))
        await self._engine.close()

    def _admit(self, request: GenerateRequest) -> DeltaStream:
        stream = self._engine.generate(request)
        self._inside += 1
        stream.when_done(self._release)
        return stream

    def _enqueue(self, request: GenerateRequest, size: int) -> DeltaStream:
        waiting = _Waiting(request, size)
        waiting.stream = DeltaStream(lambda: self._abort(waiting))
        waiting.timer = asyncio.get_running_loop().call_later(self._queue_timeout, self._give_up, waiting)
        self._queue[waiting] = None
        self._waiting_bytes += size
        heapq.heappush(self._order, (rank(request.priority, waiting.arrived), next(self._arrivals), waiting))
        return waiting.stream

    def _release(self) -> None:
        """Admit the first in the queue in the place of a sequence that has left the engine."""
        self._inside -= 1
        while self._queue:
            waiting = heapq.heappop(self._order)[2]
            if waiting in self._queue:
                self._leave(waiting)
                waiting.enter(waiting.context.run(self._admit, waiting.request))
                return

    def _give_up(self, waiting: "_Waiting") -> None:
        seconds = time.monotonic() - waiting.arrived
        self._refuse(waiting, QueueTimeout(f"the request waited {seconds:.1f} s for its turn"))

    def _refuse(self, waiting: "_Waiting", error: Exception) -> None:
        self._leave(waiting)
        waiting.stream.fail(error)

    def _abort(self, waiting: "_Waiting") -> None:
        if waiting.inner is not None:
            waiting.inner.close()
        else:
            self._leave(waiting)

    def _leave(self, waiting: "_Waiting") -> None:
        """Take a request out of the queue."""
        waiting.timer.cancel()
        del self._queue[waiting]
        self._waiting_bytes -= waiting.size
        if len(self._order) > 2 * len(self._queue):
            self._order = [entry for entry in self._order if entry[2] in self._queue]
            heapq.heapify(self._order)


class _Waiting:
    """A request that had to queue. Once admitted, its consumer's stream receives the deltas of the engine's stream."""

    stream: DeltaStream
    timer: asyncio.TimerHandle

    def __init__(self, request: GenerateRequest, size: int) -> None:
        self.request = request
        self.size = size
        self.context = contextvars.copy_context()  # it is admitted from within another request's context
        self.arrived = time.monotonic()
        self.inner: DeltaStream | None = None
        self._queue_seconds = 0.0

    def enter(self, inner: DeltaStream) -> None:
        """Pass the engine's deltas on."""
        self.inner = inner
        self._queue_seconds = time.monotonic() - self.arrived
        inner.pipe(self._pass_on)

    def _pass_on(self, output: Delta | Exception) -> None:
        if isinstance(output, Delta) and output.prompt is not None:
            seconds = output.prompt.queue_seconds + self._queue_seconds
            prompt = msgspec.structs.replace(output.prompt, queue_seconds=seconds)
            output = msgspec.structs.replace(output, prompt=prompt)
        self.stream.push(output)
