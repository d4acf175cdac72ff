"""The queue in front of an engine.

It admits as many sequences as the engine runs at once, and bounds how many others wait, and for how long.
"""

import asyncio
import contextvars
import time
from bisect import insort
from weakref import WeakValueDictionary

import msgspec

from engine.base import DeltaStream, Engine, EngineAround
from engine.errors import EngineNotReady, QueueFull, QueueTimeout
from engine.types import Delta, GenerateRequest

MOST_WAITING_BYTES = 4 << 30
"""Maximum bytes of images and image embeddings that queued requests may hold."""
SIBLING_SECONDS = 1.0
"""Seconds of arrival time by which each sequence of a client's request ranks after the previous one, so that other
requests do not wait for all choices of a large one."""


class AdmissionEngine(EngineAround):
    """An engine around `engine` that admits at most `engine.info.max_num_seqs` sequences at once.

    Others wait, in order of priority and arrival. Once `max_queue_size` sequences or `max_waiting_bytes` of images
    wait, the next raises QueueFull; one that has waited `queue_timeout` seconds raises QueueTimeout, unless another
    sequence of its `group` has been admitted: then it waits for its siblings, however long they take. A group lets
    others in between: each further sequence of it ranks as if it had come SIBLING_SECONDS later. One that is larger
    than the engine has at most three quarters of the places, so that others find the rest free.
    `PromptReport.queue_seconds` includes the wait.
    """

    def __init__(
        self, engine: Engine, max_queue_size: int, queue_timeout: float, max_waiting_bytes: int = MOST_WAITING_BYTES
    ) -> None:
        super().__init__(engine)
        self._max_queue_size = max_queue_size
        self._max_waiting_bytes = max_waiting_bytes
        self._queue_timeout = queue_timeout
        self._capacity = 0
        self._inside = 0
        """Number of sequences in the engine."""
        self._queue: list[_Waiting] = []
        """Waiting requests by sort key; equal keys in order of arrival."""
        self._waiting_bytes = 0
        self._groups = WeakValueDictionary[str, _Group]()
        """Kept alive by their sequences, waiting or inside."""

    @property
    def waiting(self) -> int:
        """Number of queued sequences."""
        return len(self._queue)

    def generate(self, request: GenerateRequest) -> DeltaStream:
        try:
            self._capacity = self.inner.info.max_num_seqs
        except EngineNotReady as error:
            return DeltaStream.failed(error)
        group = self._group(request)
        if self._has_place(group):
            return self._admit(request, group)
        if len(self._queue) >= self._max_queue_size:
            return DeltaStream.failed(QueueFull(f"{len(self._queue)} sequences wait for the engine already"))
        size = sum(map(len, request.media_data()))
        if size and self._waiting_bytes + size > self._max_waiting_bytes:
            return DeltaStream.failed(
                QueueFull(f"sequences with {self._waiting_bytes} bytes of images wait for the engine already")
            )
        return self._enqueue(request, group, size)

    async def close(self) -> None:
        for waiting in list(self._queue):
            self._refuse(waiting, EngineNotReady("the engine is closing"))
        await self.inner.close()

    def _group(self, request: GenerateRequest) -> "_Group":
        """Return the group that a request joins: a new one, if it names none."""
        group = self._groups.setdefault(request.group, _Group()) if request.group else _Group()
        group.sequences += 1
        group.size = max(group.size, request.group_size)
        return group

    def _has_place(self, group: "_Group") -> bool:
        share = self._capacity if group.size <= self._capacity else max(1, self._capacity * 3 // 4)
        return self._inside < self._capacity and group.inside < share

    def _admit(self, request: GenerateRequest, group: "_Group") -> DeltaStream:
        stream = self.inner.generate(request)
        self._inside += 1
        group.begun = True
        group.inside += 1
        stream.when_done(lambda: self._release(group))
        return stream

    def _enqueue(self, request: GenerateRequest, group: "_Group", size: int) -> DeltaStream:
        waiting = _Waiting(request, group, size)
        waiting.stream = DeltaStream(lambda: self._abort(waiting))
        waiting.timer = asyncio.get_running_loop().call_later(self._queue_timeout, self._give_up, waiting)
        self._waiting_bytes += size
        insort(self._queue, waiting, key=lambda one: one.rank)
        return waiting.stream

    def _release(self, group: "_Group") -> None:
        """Admit the first queued sequence that may take the place of a sequence of `group` that has left the engine."""
        self._inside -= 1
        group.inside -= 1
        if waiting := next((one for one in self._queue if self._has_place(one.group)), None):
            self._leave(waiting)
            waiting.enter(waiting.context.run(self._admit, waiting.request, waiting.group))

    def _give_up(self, waiting: "_Waiting") -> None:
        if waiting.group.begun:
            return
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
        self._queue.remove(waiting)
        self._waiting_bytes -= waiting.size


class _Group:
    """The sequences of one client's request."""

    def __init__(self) -> None:
        self.sequences = 0
        """Number of sequences that have arrived."""
        self.size = 0
        """Number of all sequences, as far as known."""
        self.inside = 0
        """Number of sequences in the engine."""
        self.begun = False
        """Whether any sequence has been admitted."""


class _Waiting:
    """A request that had to queue. Once admitted, its consumer's stream receives the deltas of the engine's stream."""

    stream: DeltaStream
    timer: asyncio.TimerHandle

    def __init__(self, request: GenerateRequest, group: _Group, size: int) -> None:
        self.request = request
        self.group = group
        self.size = size
        self.context = contextvars.copy_context()  # it is admitted from within another request's context
        self.arrived = time.monotonic()
        self.rank = request.rank(self.arrived) + SIBLING_SECONDS * (group.sequences - 1)
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
