"""The seams of visual generation: an engine that takes requests, and the pipeline that computes batches for it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from engine.visual.types import VisualDelta, VisualInfo, VisualRequest, VisualStats


class Picture(NamedTuple):
    """One picture, or one video, of a request."""

    request: VisualRequest
    seed: int


class Stopped(Exception):
    """All requests of the batch have been cancelled. `tick` raises it."""


Tick = Callable[[int, int], None]
"""Called after each step, with its number and that of all steps, or in between with 0. May raise Stopped."""


class VisualPipeline(Protocol):
    """A model that computes pictures and videos. All calls come from one thread, one after the other, and block it.

    Life: `load` once, then any number of `generate`, then `close` once, also after a failed `load`.
    """

    def load(self) -> VisualInfo:
        """Load the model. Raises EngineFailure."""
        ...

    def generate(self, batch: Sequence[Picture], tick: Tick) -> list[Any]:
        """Return pixels, a numpy array of [frames, height, width, 3] bytes for each picture.

        The requests of a batch agree in all but prompts and seeds; one with a file to change is alone in its batch. A
        picture depends on its prompt and seed, not on the rest of the batch.

        Raises InvalidRequest for what the pipeline refuses, EngineFailure, and whatever `tick` raises.
        """
        ...

    def prompt_tokens(self, prompt: str) -> int:
        """Return the length of a prompt in tokens of the model; 0 if it is not known."""
        ...

    @property
    def broken(self) -> bool:
        """Whether later calls will fail, too, so that the process has to be replaced."""
        ...

    def close(self) -> None: ...


class VisualStream:
    """The news of one request, from the engine to its only consumer, which iterates or has them passed on by `pipe`.

    `on_abort` is called once if the consumer closes the stream before the request is complete.
    """

    def __init__(self, on_abort: Callable[[], object]) -> None:
        self.ended = False
        """Whether the request is complete, has failed or was closed. Any thread may read it."""
        self._on_abort = on_abort
        self._news: deque[VisualDelta | Exception] = deque()
        self._changed = asyncio.Event()
        self._on_done: list[Callable[[], object]] = []
        self._sink: Callable[[Any], object] | None = None

    @classmethod
    def failed(cls, error: Exception) -> Self:
        """Return a stream that only raises `error`."""
        stream = cls(lambda: None)
        stream.fail(error)
        return stream

    def put(self, delta: VisualDelta) -> None:
        """Deliver news; the last ends the stream. Ignored once it has ended."""
        self._deliver(delta, delta.last)

    def fail(self, error: Exception) -> None:
        """End the stream with an error. Ignored once it has ended."""
        self._deliver(error, True)

    def pipe(self, sink: Callable[[Any], object]) -> None:
        """Call `sink` with all news and with the final error, instead of iterating."""
        self._sink = sink
        while self._news:
            sink(self._news.popleft())

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` from the loop once the stream has ended."""
        if self.ended:
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._on_done.append(callback)

    def close(self) -> None:
        """Drop what is unread, and abort the request if it still runs. Idempotent."""
        self._news.clear()
        if not self.ended:
            self._end()
            self._changed.set()
            self._on_abort()

    async def aclose(self) -> None:
        """Close, for `contextlib.aclosing`."""
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> VisualDelta:
        while not self._news:
            if self.ended:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        news = self._news.popleft()
        if isinstance(news, Exception):
            raise news
        return news

    def _deliver(self, news: VisualDelta | Exception, last: bool) -> None:
        if self.ended:
            return
        if last:
            self._end()
        if self._sink is not None:
            self._sink(news)
        else:
            self._news.append(news)
            self._changed.set()

    def _end(self) -> None:
        self.ended = True
        for callback in self._on_done:
            asyncio.get_running_loop().call_soon(callback)


class VisualEngine(Protocol):
    """Makes pictures and videos. Everything runs on the event loop that called `start`; no call blocks it."""

    @property
    def info(self) -> VisualInfo:
        """Facts of the backend. Raises EngineNotReady before the start."""
        ...

    @property
    def healthy(self) -> bool: ...

    async def start(self) -> None:
        """Load the model. Raises EngineFailure."""
        ...

    def generate(self, request: VisualRequest) -> VisualStream:
        """Return the news of a request, whose last has `last` set. Closing the stream aborts the request before the
        next step.

        The stream raises InvalidRequest, QueueFull, other EngineUnavailable, and EngineFailure.
        """
        ...

    def stats(self) -> AsyncIterator[VisualStats]:
        """Yield the newest figures, at once and at each change."""
        ...

    async def close(self) -> None: ...
