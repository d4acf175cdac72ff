"""The embedded engine's encoder: a vision tower in a process of its own, so that neither HTTP nor the engine waits for
it.

This side keeps the queue and moves bytes. Requests take turns, image by image, however many images each has. Of small
images the process has at most two batches at a time: one to compute, and the next. Large images, videos and large
recordings are in a lane of their own, so that small images pass them while they are decoded. The process has a few of
them at a time, which take turns; half of its places are for files of few bytes. Cancelled images that have not been
sent are skipped; of those that have, the process is told, which ends the decoding of videos and recordings.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

from engine.config import EncoderConfig
from engine.embedded.vision.messages import LARGE, LARGE_PIXELS, SMALL, Busy, Options
from engine.embedded.vision.process import EncoderProcess
from engine.encoder import EncoderInfo
from engine.errors import EngineDied, EngineError, EngineFailure, EngineNotReady
from engine.kit import logs
from engine.kit.tasks import cancel
from engine.kit.work import FairQueue, current_request
from engine.media import EncodedMedia, MediaInput, RemoteRows
from engine.process.supervisor import End, Supervisor

_BATCHES = 2
_BATCH_BYTES = 32 << 20
_BATCH_PIXELS = 1 << 25
_LARGE_BYTES = 1 << 20
"""LARGE_PIXELS in bytes, for images whose pixels have not been counted."""
_OPEN_BYTES = _BATCHES * _BATCH_BYTES
"""Bytes of the files that take turns, unless a single file has more."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    image: MediaInput
    request: Hashable
    done: asyncio.Future[EncodedMedia]
    number: int = field(default_factory=count().__next__)

    @property
    def lane(self) -> int:
        if self.image.kind == "video":
            return LARGE
        pixels = self.image.pixels
        return LARGE if (pixels > LARGE_PIXELS if pixels else len(self.image.data) > _LARGE_BYTES) else SMALL


class _ImageLane:
    """Images that wait, by request, and the batches that the process has, each by number."""

    def __init__(self) -> None:
        self.waiting: FairQueue[Hashable, _Job] = FairQueue()
        self.sent: list[dict[int, _Job]] = []
        self.timer: asyncio.TimerHandle | None = None
        self.hung = False

    def add(self, job: _Job) -> None:
        self.waiting.add(job.request, job)

    def put_back(self, jobs: Sequence[_Job]) -> None:
        """Put images that were in a batch in front of all others."""
        waiting, self.waiting = self.waiting, FairQueue()
        for job in (*jobs, *waiting):
            self.add(job)

    def next_batch(self, process: EncoderProcess) -> list[_Job]:
        """Take the images that the process is to have now, in turns, without those whose requests have ended."""
        if len(self.sent) >= _BATCHES:
            return []
        most = max(2, process.together)
        batch: list[_Job] = []
        size = pixels = 0
        while self.waiting and len(batch) < most:
            request, job = next(self.waiting.firsts())
            if not job.done.done():
                size += len(job.image.data)
                pixels += job.image.pixels
                if batch and (size > _BATCH_BYTES or pixels > _BATCH_PIXELS):
                    break
                batch.append(job)
            self.waiting.take(request)
        return batch

    def unfinished(self) -> list[list[_Job]]:
        """Forget the batches that the process had; return the images of each that still have waiters. Suspect of having
        ended the process are those of the first."""
        batches = [[job for job in batch.values() if not job.done.done()] for batch in self.sent]
        self.sent.clear()
        return batches


class _LargeLane(_ImageLane):
    """Large files, each a batch of its own. Any of those that the process has may have ended it."""

    hanging: int | None = None
    """Number of a file that takes too long, of which the process has told."""

    def next_batch(self, process: EncoderProcess) -> list[_Job]:
        while ended := next((request for request, job in self.waiting.firsts() if job.done.done()), None):
            self.waiting.take(ended)
        if len(self.sent) >= process.open:
            return []
        sizes = [len(job.image.data) for batch in self.sent for job in batch.values()]
        sizes = [size for size in sizes if size > _LARGE_BYTES]
        for request, job in self.waiting.firsts():
            size = len(job.image.data)
            full = len(sizes) >= process.open // 2 or sum(sizes) + size > _OPEN_BYTES
            if not sizes or not full or size <= _LARGE_BYTES:
                return [self.waiting.take(request)]
        return []

    def unfinished(self) -> list[list[_Job]]:
        jobs = [*chain(*super().unfinished())]
        number, self.hanging = self.hanging, None
        hanging = [job for job in jobs if job.number == number]
        return [hanging, [job for job in jobs if job not in hanging]] if hanging else [jobs]


class EmbeddedEncoder:
    """An `Encoder` whose process is restarted when it dies, after pauses that grow from 0.5 to 30 seconds.

    A process that is busy with a lane but silent about it for `timeout_seconds`, or computes on one large file for as
    long, is killed. The images that may be the cause are then retried one by one, with nothing else beside them; others
    lose nothing but time. An image that takes too long
    by itself raises EngineFailure, one that has ended the process twice raises EngineDied. If the process does not
    start again, all do.
    """

    def __init__(self, config: EncoderConfig) -> None:
        self._timeout = config.timeout_seconds
        self._options = Options(config, logs.current())
        self._info: EncoderInfo | None = None
        self._process: EncoderProcess | None = None
        self._serving = False
        self._supervision: asyncio.Task[None] | None = None
        self._large = _LargeLane()
        self._lanes = [_ImageLane(), self._large]
        self._suspects: deque[_Job] = deque()
        """Images of batches that ended the process or took too long, one of which may be the cause."""
        self._suspect: _Job | None = None
        """The one that is tried again now."""
        self._dropped: list[int] = []
        """Numbers of images whose requests have ended, of which the process is to be told."""
        self._released: deque[RemoteRows] = deque()
        """Embeddings that nobody needs any more; the process has yet to be told."""
        self._wake = asyncio.Event()

    @property
    def info(self) -> EncoderInfo:
        if self._info is None:
            raise EngineNotReady("the encoder has not started")
        return self._info

    @property
    def healthy(self) -> bool:
        return self._serving

    @property
    def pid(self) -> int | None:
        """Id of the encoding process; None while there is none."""
        return self._process.process.pid if self._process is not None and self._serving else None

    async def start(self) -> None:
        await self._start()
        self._supervision = asyncio.create_task(self._supervise(), name="image-encoder")
        await asyncio.sleep(0)  # a task that is cancelled before it begins would leave the process behind

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> list[EncodedMedia]:
        if not self.healthy:
            raise EngineNotReady("the encoder is starting, restarting or closing")
        loop = asyncio.get_running_loop()
        request = current_request()
        jobs = [_Job(image, request, loop.create_future()) for image in media]
        for job in jobs:
            self._lanes[job.lane].add(job)
        self._wake.set()
        try:
            return await asyncio.gather(*(job.done for job in jobs))
        except BaseException:  # cancellation included
            for job in jobs:
                if job.done.cancel() or job.done.cancelled():  # by `gather`
                    self._dropped.append(job.number)
                    self._wake.set()
                elif job.done.exception() is None:
                    self._discard(job.done.result())
            raise

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        self._released.append(rows)
        self._wake.set()

    async def close(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision])

    async def release_weights(self) -> None:
        """End the process, and with it all that it has on a device."""
        await self.close()

    async def resume_weights(self) -> None:
        if self._serving:
            return
        before = self.info
        await self.start()
        if self._info != before:
            self._info = before
            await self.close()
            raise EngineFailure("the model's files are others than those that were loaded: restart the replica")

    async def _start(self) -> EncoderProcess:
        """Start the process. Raises EngineFailure."""
        self._process, self._info = await EncoderProcess.start(self._options)
        self._serving = True
        return self._process

    async def _supervise(self) -> None:
        """Serve, and restart, until cancelled."""
        try:
            await Supervisor(self._live).run()
        finally:
            self._serving = False
            self._fail_all(EngineNotReady("the encoder is closing"))
            if self._process is not None:
                await self._process.stop()

    async def _live(self) -> End:
        """Serve by one process until it ends: the one that `start` has started, or a new one."""
        if self._process is not None and self._serving:
            process = self._process
        else:
            try:
                process = await self._start()
            except EngineFailure as error:
                self._fail_all(EngineDied("the encoder process was lost and does not start again at present"))
                return End(str(error))
        since = time.monotonic()
        try:
            await self._serve(process)
        except Exception:
            log.exception("lost the connection to the encoder process")
        self._serving = False
        reason = f"the encoder process died ({await process.stop()})"
        self._recover(reason)
        return End(reason, time.monotonic() - since)

    async def _serve(self, process: EncoderProcess) -> None:
        """Send and receive until one of the two finds that the process has gone, or fails."""
        tasks = [asyncio.create_task(self._send(process)), asyncio.create_task(self._receive(process))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(tasks)
        for task in done:
            task.result()

    async def _send(self, process: EncoderProcess) -> None:
        while True:
            self._wake.clear()
            if self._dropped:
                dropped, self._dropped = self._dropped, []
                if not await process.drop(dropped):
                    return
            while self._released:
                if not await process.release(self._released.popleft()):
                    return
            for index, batch in self._batches(process):
                lane = self._lanes[index]
                lane.sent.append({job.number: job for job in batch})
                if len(lane.sent) == 1:
                    self._arm(lane, process)
                if not await process.send(index, [job.image for job in batch], [job.number for job in batch]):
                    return
            await self._wake.wait()

    def _batches(self, process: EncoderProcess) -> Iterator[tuple[int, list[_Job]]]:
        """Yield what the process is to have now: a suspect alone, or batches of the lanes."""
        while self._suspects and self._suspects[0].done.done():
            self._suspects.popleft()
        if self._suspects or self._suspect is not None:
            if not any(lane.sent for lane in self._lanes):
                self._suspect = self._suspects.popleft()
                yield self._suspect.lane, [self._suspect]
            return
        for index, lane in enumerate(self._lanes):
            while batch := lane.next_batch(process):
                yield index, batch

    async def _receive(self, process: EncoderProcess) -> None:
        while (received := await process.receive()) is not None:
            if isinstance(received, Busy):
                self._arm(self._large, process)
                if received.seconds >= self._timeout:
                    self._large.hanging = received.number
                    self._kill(self._large, process)
                continue
            index, outcomes = received
            lane = self._lanes[index]
            batch = next(batch for batch in lane.sent if outcomes.keys() <= batch.keys())
            for number, outcome in outcomes.items():
                done = batch.pop(number).done
                if done.done():
                    self._discard(outcome)
                elif isinstance(outcome, EngineError):
                    done.set_exception(outcome)
                else:
                    done.set_result(outcome)
            if not batch:
                lane.sent.remove(batch)
                self._suspect = None
            self._arm(lane, process)
            self._wake.set()

    def _discard(self, outcome: EncodedMedia | EngineError) -> None:
        """Release embeddings that stayed with the process, of an image for which nobody waits any more."""
        if isinstance(outcome, EncodedMedia) and outcome.remote is not None:
            self.release(outcome.remote)

    def _arm(self, lane: _ImageLane, process: EncoderProcess) -> None:
        """Restart the timeout for the lane's next message, if one is due."""
        self._disarm(lane)
        if lane.sent:
            lane.timer = asyncio.get_running_loop().call_later(self._timeout, self._kill, lane, process)

    def _disarm(self, lane: _ImageLane) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None

    def _kill(self, lane: _ImageLane, process: EncoderProcess) -> None:
        lane.hung = True
        process.kill()

    def _recover(self, reason: str) -> None:
        """Queue the images of the lost process again, except one that made it hang or ended it twice.

        Suspect are the first batch of a lane that hung or, if none did, the first of each; of large files all.
        """
        hung = any(lane.hung for lane in self._lanes)
        suspect, self._suspect = self._suspect, None
        for lane in self._lanes:
            self._disarm(lane)
            first, *others = lane.unfinished() or [[]]
            if hung and not lane.hung:
                others, first = [first, *others], []
            if len(first) == 1 and hung:
                first.pop().done.set_exception(
                    EngineFailure(f"encoding the image took longer than {self._timeout:g} seconds")
                )
            elif first == [suspect]:
                first.pop().done.set_exception(EngineDied(f"{reason} whenever it had the image"))
            lane.hung = False
            self._suspects.extend(first)
            lane.put_back([job for batch in others for job in batch])

    def _fail_all(self, error: EngineError) -> None:
        jobs = [*self._suspects]
        for lane in self._lanes:
            self._disarm(lane)
            jobs += [*chain(*lane.unfinished()), *lane.waiting]
            lane.waiting = FairQueue()
        self._suspects.clear()
        self._suspect = None
        for job in jobs:
            if not job.done.done():
                job.done.set_exception(error)
