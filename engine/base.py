"""The engine seam: token ids in, deltas out.

An engine has three outputs: a stream of deltas for each request, the latest statistics, and a feed of events. They
belong to one event loop and must be called from its thread.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from engine.kv_events import KvEvent
from engine.stats import IterationStats
from engine.types import Delta, EngineInfo, GenerateRequest, NextHandoff

T = TypeVar("T")
Sink = Callable[[Delta | Exception], object]
MOST_MERGED = 64
"""Maximum number of deltas that are merged into one. More would block the event loop while they are detokenised."""


class Engine(Protocol):
    """One model that generates tokens. Everything runs on the event loop that called `start`; no call blocks it.

    Call `start` once, then `generate` any number of times concurrently, then `close` once; `close` is safe before and
    after a failed start.
    """

    @property
    def info(self) -> EngineInfo:
        """Facts fixed at start. Raises EngineNotReady before the engine has started for the first time."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether a request made now would be accepted. Cheap: no call into the engine."""
        ...

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineFailure, with nothing left running, if it cannot."""
        ...

    def generate(self, request: GenerateRequest) -> "DeltaStream":
        """Generate one sequence.

        The stream yields at least one delta and ends after the one with a `finish_reason`. Tokens that became ready
        while the consumer was busy arrive in one delta. It raises InvalidRequest before the first delta or never, and
        EngineUnavailable or EngineFailure at any time. Closing the stream, or cancelling the task that awaits it, is
        the only way to abort: the engine stops within one step and frees the sequence's KV blocks.

        A `prefill_only` request yields one delta, after early ones if it asks for these. If that has no
        `finish_reason` it has `held`, and the stream then stays open: the KV blocks are kept until it is closed. A
        request with a `handoff` continues from there: the engine reads the blocks, and its first delta says that it no
        longer needs them. If it cannot read them it computes the prompt itself. After an early handoff it raises
        EngineUnavailable instead, as long as it does not know the first token.
        """
        ...

    async def continue_handoff(self, following: NextHandoff) -> bool:
        """Pass on the next handoff of a running request that was begun with an early one: more blocks can be read, or
        the first token is there.

        Returns False if the engine runs no such request, or cannot begin with an early handoff.
        """
        ...

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        """Yield KV-cache events in order, in batches.

        The first are Created and Stored events for what the cache contains already; then come the changes. Any number
        of consumers; ends when the engine closes.
        """
        ...

    def stats(self) -> AsyncIterator[IterationStats]:
        """Yield the latest iteration statistics whenever they change; slow consumers skip to the newest.

        Any number of consumers.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Drop every reusable KV block on the device, the host and the disk. Running sequences keep their blocks.

        Raises EngineNotReady, and InvalidRequest from a backend that cannot do it.
        """
        ...

    async def start_profile(self) -> None:
        """Record what the engine computes until `stop_profile`.

        Raises EngineNotReady, InvalidRequest while a profile is recorded, and NotSupported from a backend without one.
        """
        ...

    async def stop_profile(self, trace: str) -> None:
        """Write what was recorded to the file `trace`, in Chrome's format, gzip-compressed.

        Raises EngineNotReady, InvalidRequest if none is recorded, NotSupported, and EngineFailure if the file cannot
        be written.
        """
        ...

    async def close(self) -> None:
        """Abort running requests, stop the engine and free its resources."""
        ...


@runtime_checkable
class Preparable(Protocol):
    """An engine that can prepare most of its start before it is needed."""

    async def prepare(self) -> None:
        """Do the part of `start` that is possible while another engine of the same configuration runs. Raises
        EngineFailure."""
        ...


class EngineAround:
    """Base of an engine that decides which requests reach the engine `inner`, and passes on everything else."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    @property
    def info(self) -> EngineInfo:
        return self.inner.info

    @property
    def healthy(self) -> bool:
        return self.inner.healthy

    async def start(self) -> None:
        await self.inner.start()

    async def continue_handoff(self, following: NextHandoff) -> bool:
        return await self.inner.continue_handoff(following)

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self.inner.kv_events()

    def stats(self) -> AsyncIterator[IterationStats]:
        return self.inner.stats()

    async def reset_prefix_cache(self) -> None:
        await self.inner.reset_prefix_cache()

    async def start_profile(self) -> None:
        await self.inner.start_profile()

    async def stop_profile(self, trace: str) -> None:
        await self.inner.stop_profile(trace)


class DeltaStream:
    """The deltas of one request, from the engine to its only consumer.

    The engine calls `put` and `fail`; the consumer iterates, or has the deltas passed on by `pipe`. Deltas that arrive
    while the consumer is busy are merged, up to MOST_MERGED into one. `on_abort` is called once if the consumer closes
    the stream, or is cancelled while it waits, before the request has finished.
    """

    __slots__ = ("_deltas", "_error", "_finished", "_loop", "_on_abort", "_on_done", "_sink", "_waiter")

    def __init__(self, on_abort: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()  # kept: in Python 3.11 each query costs a system call
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._finished = False
        self._on_abort = on_abort
        self._on_done: list[Callable[[], object]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @classmethod
    def failed(cls, error: Exception) -> Self:
        """Return a stream that raises `error`, for a request that never began."""
        stream = cls(lambda: None)
        stream.fail(error)
        return stream

    def put(self, delta: Delta) -> None:
        """Deliver a delta; one with a `finish_reason` ends the stream. Ignored once the stream has ended."""
        if self._finished:
            return
        if delta.finish_reason is not None:
            self._finish()
        if self._sink is not None:
            self._sink(delta)
        else:
            self._deltas.append(delta)
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, raised after the deltas delivered before. Ignored once the stream has ended."""
        if self._finished:
            return
        self._finish()
        if self._sink is not None:
            self._sink(error)
        else:
            self._error = error
            self._wake()

    def abort(self, error: Exception) -> None:
        """End the stream with `error` from the engine's side, and abort the request."""
        if not self._finished:
            self.fail(error)
            self._on_abort()

    def push(self, output: Delta | Exception) -> None:
        """Deliver what another stream's `pipe` passed on: a delta, or the error that ends the stream."""
        if isinstance(output, Exception):
            self.fail(output)
        else:
            self.put(output)

    def pipe(self, sink: Sink) -> None:
        """Call `sink` with each delta and with the final error, instead of iterating.

        Deltas delivered already come first. A task for each request, woken for each token, would cost several times as
        much.
        """
        self._sink = sink
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            sink(delta)
        if self._error is not None:
            error, self._error = self._error, None
            sink(error)

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` from the loop once the stream has ended."""
        if self._finished:
            self._loop.call_soon(callback)
        else:
            self._on_done.append(callback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if len(self._deltas) > MOST_MERGED:  # of a slow reader: others have their turn, and its own end is noticed
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.close()
                raise
        while not self._deltas:
            if self._finished:
                await asyncio.sleep(0)  # also a consumer that did not wait sees the end after the callbacks have run
                error, self._error = self._error, None
                raise StopAsyncIteration if error is None else error
            assert self._waiter is None, "a stream has one consumer"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas[:MOST_MERGED], self._deltas[MOST_MERGED:]
        return deltas[0] if len(deltas) == 1 else merge(deltas)

    async def aclose(self) -> None:
        """Close, for `contextlib.aclosing`."""
        self.close()

    def close(self) -> None:
        """Drop unread deltas and abort the request if it still runs. Idempotent; a waiting consumer sees the end."""
        self._deltas.clear()
        self._error = None
        if not self._finished:
            self._finish()
            self._wake()
            self._on_abort()

    def _finish(self) -> None:
        """Schedule the callbacks, before the consumer sees the end."""
        self._finished = True
        for callback in self._on_done:
            self._loop.call_soon(callback)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(deltas: Sequence[Delta]) -> Delta:
    """Merge consecutive deltas into one."""
    last = deltas[-1]
    return Delta(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt=next((delta.prompt for delta in deltas if delta.prompt is not None), None),
        held=last.held,
        performance=last.performance,
    )


class _Watched:
    """A source whose consumers wait for its next change."""

    def __init__(self) -> None:
        self._closed = False
        self._next_change: asyncio.Event | None = None
        """None if nobody waits for it."""

    def close(self) -> None:
        """End all iterations, each after its pending values."""
        self._closed = True
        self._notify()

    async def _wait_for_change(self) -> None:
        if self._next_change is None:
            self._next_change = asyncio.Event()
        await self._next_change.wait()

    def _notify(self) -> None:
        if self._next_change is not None:
            self._next_change.set()
            self._next_change = None


class Latest(_Watched, Generic[T]):
    """The latest of a series of values, for any number of consumers; slow ones skip to the newest."""

    def __init__(self) -> None:
        super().__init__()
        self._value: T | None = None
        self._version = 0

    def publish(self, value: T) -> None:
        """Make `value` the newest one."""
        self._value = value
        self._version += 1
        self._notify()

    async def values(self) -> AsyncIterator[T]:
        """Yield the newest value, if there is one, then each newer one."""
        seen = 0
        while True:
            if seen != self._version:
                seen = self._version
                assert self._value is not None
                yield self._value
            elif self._closed:
                return
            else:
                await self._wait_for_change()


class EventFeed(_Watched, Generic[T]):
    """Events in order, for any number of consumers, each from the start of its iteration.

    A slow consumer loses the oldest events.
    """

    def __init__(self, limit: int = 65536) -> None:
        super().__init__()
        self._limit = limit
        self._waiting: dict[object, deque[T]] = {}

    @property
    def consumers(self) -> int:
        """Number of iterations in progress."""
        return len(self._waiting)

    def put(self, event: T) -> None:
        for waiting in self._waiting.values():
            waiting.append(event)
        self._notify()

    async def batches(self) -> AsyncGenerator[list[T], None]:
        """Yield the initial events, then batches of new ones."""
        consumer = object()
        waiting = deque[T](maxlen=self._limit)
        self._waiting[consumer] = waiting
        try:
            for batch in self._before():
                yield batch
            while True:
                if waiting:
                    batch = list(waiting)
                    waiting.clear()
                    yield batch
                elif self._closed:
                    return
                else:
                    await self._wait_for_change()
        finally:
            del self._waiting[consumer]

    def _before(self) -> Iterable[list[T]]:
        """Return the first items for a new consumer."""
        return ()
