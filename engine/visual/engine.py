"""The queue in front of a pipeline: pictures of equal requests are computed together, and requests take turns."""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine.base import Latest
from engine.errors import EngineError, EngineFailure, EngineNotReady, QueueFull
from engine.kit.tasks import cancel
from engine.visual.base import Picture, Stopped, VisualPipeline, VisualStream
from engine.visual.files import encode
from engine.visual.types import VisualConfig, VisualDelta, VisualInfo, VisualRequest, VisualStats

_ENCODERS = 2
"""Threads that write files."""
_POSTPROCESSING = 95
"""Percent at which the pixels of a request are known."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Drawing:
    """One request, until its last file is delivered."""

    request: VisualRequest
    stream: VisualStream
    waiting: deque[int] = field(default_factory=deque)
    """Indices of its pictures that are to be computed."""
    computed: int = 0
    delivered: int = 0
    prompt_tokens: int = 0
    preview: asyncio.Task[None] | None = None
    """Writes the newest unfinished picture."""
    alone: bool = False
    """Whether it shares no batch: one in which it was has failed."""

    @property
    def key(self) -> object:
        """Equal for requests whose pictures may be computed together."""
        asked = self.request
        if self.alone or asked.image or asked.frames:
            return self
        same = asked.width, asked.height, asked.steps, asked.guidance, asked.previews
        return *same, asked.negative_prompt is None

    def progress(self, share: float) -> int:
        """Return the percentage of the work that is done, with a `share` of the picture that is being computed."""
        return int(_POSTPROCESSING * (self.computed + share) / len(self.request.seeds))


Batch = list[tuple[_Drawing, int]]
"""Pictures that are computed together, each a request and its index there."""


class QueuedVisualEngine:
    """A `VisualEngine` over a pipeline, which has a thread of its own. Files are written in other threads, while the
    next batch is computed; if these fall behind, the next batch waits.
    """

    def __init__(self, config: VisualConfig, pipeline: VisualPipeline) -> None:
        self._config = config
        self._pipeline = pipeline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="visual")
        self._encoders = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="visual-files")
        self._jobs: OrderedDict[_Drawing, None] = OrderedDict()
        """Requests with pictures that wait, in the order of turns."""
        self._streams: set[VisualStream] = set()
        """Streams of requests that are not complete."""
        self._unwritten = asyncio.Semaphore(2 * config.max_batch)
        """Places for pixels that are not a file yet."""
        self._news = asyncio.Event()
        self._info: VisualInfo | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._hangs = False
        self._progress = 0.0
        """Time at which the last step ended."""
        self._figures = VisualStats()
        self._stats: Latest[VisualStats] = Latest()

    @property
    def info(self) -> VisualInfo:
        if self._info is None:
            raise EngineNotReady("the model is loading")
        return self._info

    @property
    def healthy(self) -> bool:
        return self._info is not None and not (self._closed or self._hangs or self._pipeline.broken)

    async def start(self) -> None:
        self._info = await self._in_thread(self._pipeline.load)
        self._stats.publish(self._figures)
        self._spawn(self._run())

    def generate(self, request: VisualRequest) -> VisualStream:
        """Queue a request."""
        if self._closed:
            return VisualStream.failed(EngineNotReady("the engine is closing"))
        count, waiting = len(request.seeds), self._figures.waiting
        if waiting and waiting + count > self._config.max_queue:
            return VisualStream.failed(QueueFull("too many pictures and videos wait already (VISUAL_MAX_QUEUE)"))
        stream = VisualStream(lambda: self._abort(job))
        job = _Drawing(request, stream, deque(range(count)))
        self._jobs[job] = None
        self._streams.add(stream)
        stream.when_done(lambda: self._streams.discard(stream))
        self._note(waiting=count)
        self._news.set()
        return stream

    def stats(self) -> AsyncIterator[VisualStats]:
        return self._stats.values()

    async def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            stream.fail(EngineNotReady("the engine is closing"))
        self._jobs.clear()
        await cancel(self._tasks)
        if not self._hangs:
            await self._in_thread(self._pipeline.close)
        self._thread.shutdown(wait=False)
        self._encoders.shutdown(wait=False)
        self._stats.close()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            batch = self._next_batch()
            if not batch:
                await self._news.wait()
                continue
            await self._compute(batch)
            for job, _ in batch:
                if job in self._jobs:  # behind those that have come meanwhile
                    self._jobs.move_to_end(job)

    def _next_batch(self) -> Batch:
        """Take pictures of the request whose turn it is, and of those that may be computed with it, one of each in
        turns.
        """
        first = next(iter(self._jobs), None)
        if first is None:
            return []
        together = [job for job in self._jobs if job.key == first.key]
        batch: Batch = []
        while together and len(batch) < self._config.max_batch:
            for job in list(together):
                if len(batch) == self._config.max_batch or (first.request.image and batch):
                    return self._taken(batch)
                batch.append((job, job.waiting.popleft()))
                if not job.waiting:
                    together.remove(job)
        return self._taken(batch)

    def _taken(self, batch: Batch) -> Batch:
        for job, _ in batch:
            if not job.waiting:
                self._jobs.pop(job, None)
        self._note(waiting=-len(batch), running=len(batch))
        return batch

    async def _compute(self, batch: Batch) -> None:
        """Compute a batch, and have its files written."""
        loop = asyncio.get_running_loop()
        jobs = {job for job, _ in batch}

        def tick(step: int, steps: int) -> None:
            self._progress = time.monotonic()
            if step:
                loop.call_soon_threadsafe(self._stepped, jobs, step / max(steps, 1))
            if all(job.stream.ended for job in jobs):
                raise Stopped

        def show(pixels: list[Any]) -> None:
            loop.call_soon_threadsafe(self._show, batch, pixels)

        began = time.monotonic()
        error: Exception | None = None
        pixels: list[Any] = []
        tokens: list[int] = []
        watch = self._watch()
        pictures = [Picture(job.request, job.request.seeds[index]) for job, index in batch]

        def work() -> tuple[list[Any], list[int]]:
            found = self._pipeline.generate(pictures, tick, show)
            if len(found) != len(pictures):
                raise EngineFailure(f"the pipeline made {len(found)} pictures instead of {len(pictures)}")
            return found, [self._pipeline.prompt_tokens(picture.request.prompt) for picture in pictures]

        try:
            if not all(job.stream.ended for job in jobs):
                pixels, tokens = await self._in_thread(work)
        except Stopped:
            pass
        except EngineError as found:
            error = found
        except Exception as found:  # of any kind: the others go on
            log.exception("a batch of pictures failed")
            error = EngineFailure(f"the pipeline failed: {type(found).__name__}")
        finally:
            if watch is not None:
                watch.cancel()
        seconds = time.monotonic() - began
        self._note(running=-len(batch), batches=bool(pixels), busy_seconds=seconds)
        if error is not None:
            self._failed(batch, jobs, error)
            return
        if not pixels:
            self._note(aborted=len(batch))
        for (job, index), frames, count in zip(batch, pixels, tokens, strict=False):
            job.prompt_tokens = count
            job.computed += 1
            if job.stream.ended:
                self._note(aborted=1)
                continue
            await self._unwritten.acquire()
            self._note(encoding=1)
            self._spawn(self._write(job, index, frames, seconds))

    def _watch(self) -> asyncio.Task[None] | None:
        """Watch a batch that begins: the process has to be replaced if it makes no progress."""
        self._progress = time.monotonic()
        hang = self._config.hang_seconds

        async def watch() -> None:
            while (left := self._progress + hang - time.monotonic()) > 0:  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(left)
            log.error("no step of a batch has ended for %g s", hang)
            self._hangs = True

        return asyncio.create_task(watch()) if hang else None

    def _failed(self, batch: Batch, jobs: set[_Drawing], error: Exception) -> None:
        """Report a failure to the request that has caused it. Of several, each is tried alone."""
        if len(jobs) == 1 or self._pipeline.broken:
            for job in jobs:
                self._jobs.pop(job, None)
                self._note(waiting=-len(job.waiting), failed=1)
                job.waiting.clear()
                job.stream.fail(error)
            return
        for job, index in batch:
            if not job.stream.ended:
                job.alone = True
                job.waiting.append(index)
                self._jobs[job] = None
                self._note(waiting=1)

    async def _write(self, job: _Drawing, index: int, frames: Any, seconds: float) -> None:
        """Write the file of a picture, and deliver it."""
        loop = asyncio.get_running_loop()
        try:
            if job.computed == len(job.request.seeds):
                job.stream.put(VisualDelta("postprocessing", _POSTPROCESSING))
            going_on: Callable[[], bool] = lambda: not job.stream.ended  # noqa: E731
            data = await loop.run_in_executor(self._encoders, encode, frames, job.request, going_on)
        except Exception:
            log.exception("a file could not be written")
            self._note(failed=1)
            job.stream.fail(EngineFailure("the file could not be written"))
            return
        finally:
            self._unwritten.release()
            self._note(encoding=-1)
        if job.preview is not None:
            await job.preview
        if job.stream.ended:
            self._note(aborted=1)
            return
        job.delivered += 1
        video = bool(job.request.frames)
        self._note(images=not video, videos=video, frames=len(frames))
        last = job.delivered == len(job.request.seeds)
        progress = 100 if last else job.progress(0)
        job.stream.put(VisualDelta("file", progress, index, data, last, job.prompt_tokens, seconds))

    def _show(self, batch: Batch, pixels: list[Any]) -> None:
        for (job, index), frames in zip(batch, pixels, strict=True):
            job.preview = self._spawn(self._preview(job, index, frames, job.preview))

    async def _preview(self, job: _Drawing, index: int, frames: Any, before: asyncio.Task[None] | None) -> None:
        """Write the file of an unfinished picture, and deliver it after the one `before` it."""
        loop = asyncio.get_running_loop()
        try:
            data = await loop.run_in_executor(self._encoders, encode, frames, job.request, lambda: not job.stream.ended)
        except Exception:
            log.exception("a preview could not be written")
            return
        if before is not None:
            await before
        job.stream.put(VisualDelta("preview", job.progress(0), index, data))

    def _stepped(self, jobs: set[_Drawing], share: float) -> None:
        self._note(steps=1)
        for job in jobs:
            job.stream.put(VisualDelta("generating", job.progress(share)))

    def _abort(self, job: _Drawing) -> None:
        """Forget the pictures of a request that wait; what is being computed notices after its step."""
        if job in self._jobs:
            del self._jobs[job]
            self._note(waiting=-len(job.waiting), aborted=len(job.waiting))
            job.waiting.clear()

    def _note(self, **changes: float) -> None:
        now = {name: getattr(self._figures, name) + change for name, change in changes.items()}
        self._figures = replace(self._figures, **now)
        self._stats.publish(self._figures)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
