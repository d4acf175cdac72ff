"""The embedded engine's encoder: a vision tower in a process of its own, which neither HTTP nor the engine waits for.

This side keeps the queue and moves bytes. The process has at most two small batches at a time: one to compute, and the
next. Cancelled images that have not been sent are skipped.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EncoderConfig
from engine.embedded.vision.messages import Options
from engine.embedded.vision.process import EncoderProcess
from engine.encoder import EncoderInfo
from engine.errors import EngineDied, EngineError, EngineFailure, EngineNotReady
from engine.kit.tasks import cancel
from engine.media import EncodedMedia, MediaInput
from engine.process.supervisor import End, Supervisor

_BATCHES = 2
_BATCH_IMAGES = 8
_BATCH_BYTES = 32 << 20

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    image: MediaInput
    done: asyncio.Future[EncodedMedia]
    alone: bool = False
    """Send in a batch of its own: it was in a batch that ended the process or took too long, and may be the cause."""


class EmbeddedEncoder:
    """An `Encoder` whose process is restarted when it dies, after pauses that grow from 0.5 to 30 seconds.

    A process that is busy but silent for `timeout_seconds` is killed. The images of its batch are then retried one by
    one; others are not affected. An image that takes too long by itself raises EngineFailure, one that has ended the
    process twice raises EngineDied. If the process does not start again, all do.
    """

    def __init__(self, config: EncoderConfig, log_level: str = "info") -> None:
        self._timeout = config.timeout_seconds
        self._options = Options(config, log_level)
        self._info: EncoderInfo | None = None
        self._process: EncoderProcess | None = None
        self._serving = False
        self._supervision: asyncio.Task[None] | None = None
        self._waiting: deque[_Job] = deque()
        self._sent: deque[dict[int, _Job]] = deque()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._hung = False

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

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> list[EncodedMedia]:
        if not self.healthy:
            raise EngineNotReady("the encoder is starting, restarting or closing")
        loop = asyncio.get_running_loop()
        jobs = [_Job(image, loop.create_future()) for image in media]
        self._waiting.extend(jobs)
        self._wake.set()
        try:
            return await asyncio.gather(*(job.done for job in jobs))
        finally:
            for job in jobs:
                job.done.cancel()

    async def close(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision])

    async def _start(self) -> EncoderProcess:
        """Raises EngineFailure."""
        self._process, self._info = await EncoderProcess.start(self._options)
        self._serving = True
        return self._process

    async def _supervise(self) -> None:
        """Serve, and restart, until cancelled."""
        try:
            await Supervisor(self._live).run()
        finally:
            self._serving = False
            self._disarm()
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
            while len(self._sent) < _BATCHES and (batch := self._next_batch()):
                self._sent.append(dict(enumerate(batch)))
                if len(self._sent) == 1:
                    self._arm(process)
                if not await process.send([job.image for job in batch]):
                    return
            await self._wake.wait()

    async def _receive(self, process: EncoderProcess) -> None:
        while (outcomes := await process.receive()) is not None:
            batch = self._sent[0]
            for index, outcome in outcomes.items():
                done = batch.pop(index).done
                if done.done():
                    continue
                if isinstance(outcome, EngineError):
                    done.set_exception(outcome)
                else:
                    done.set_result(outcome)
            if not batch:
                self._sent.popleft()
            self._arm(process)
            self._wake.set()

    def _next_batch(self) -> list[_Job]:
        """Return the images that have waited longest, without those that nobody waits for any more."""
        batch: list[_Job] = []
        size = 0
        while self._waiting and len(batch) < _BATCH_IMAGES:
            job = self._waiting[0]
            if not job.done.done():
                size += len(job.image.data)
                if batch and (size > _BATCH_BYTES or job.alone or batch[0].alone):
                    break
                batch.append(job)
            self._waiting.popleft()
        return batch

    def _arm(self, process: EncoderProcess) -> None:
        """Restart the timeout for the next answer, if one is due."""
        self._disarm()
        if self._sent:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._kill, process)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _kill(self, process: EncoderProcess) -> None:
        self._hung = True
        process.kill()

    def _recover(self, reason: str) -> None:
        """Queue the images of the lost process again, except one that made it hang or ended it twice."""
        self._disarm()
        hung, self._hung = self._hung, False
        first, *others = [[job for job in batch.values() if not job.done.done()] for batch in self._sent] or [[]]
        self._sent.clear()
        if len(first) == 1 and hung:
            first.pop().done.set_exception(
                EngineFailure(f"encoding the image took longer than {self._timeout:g} seconds")
            )
        elif len(first) == 1 and first[0].alone:
            first.pop().done.set_exception(EngineDied(f"{reason} whenever it had the image"))
        for job in first:
            job.alone = True
        self._waiting.extendleft(reversed([*first, *(job for batch in others for job in batch)]))

    def _fail_all(self, error: EngineError) -> None:
        for job in [*(job for batch in self._sent for job in batch.values()), *self._waiting]:
            if not job.done.done():
                job.done.set_exception(error)
        self._sent.clear()
        self._waiting.clear()
