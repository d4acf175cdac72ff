"""Works through video jobs, a few at a time."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.types import Scope

from engine.errors import EngineDied, EngineFailure, EngineUnavailable
from engine.kit.tasks import cancel
from engine.visual.base import VisualEngine
from multimodal.errors import DeadlineExceeded
from routers.database import StoreUnavailable, work_elected
from routers.visual.jobs import VideoJobs, VideoRecord

_TOGETHER = 2
"""Jobs at a time: one is written to a file while the next is computed."""
_MOST_DEATHS = 3
"""Number of deaths of the engine during a job after which the job has failed."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class VideoWorker:
    """Does all jobs. Of processes with the same store, one works at a time; when it ends, another takes over."""

    jobs: VideoJobs
    engine: VisualEngine
    timeout_seconds: float
    """Seconds that a job may take, its wait for the engine included."""
    render_error: Callable[[Exception, Scope], bytes]
    ready: Callable[[], bool]
    """Return whether the replica accepts requests."""
    pause: float = 1.0
    """Seconds between checks for jobs of other processes, and for the lock if another process is working."""
    ended: dict[str, int] = field(default_factory=lambda: {"completed": 0, "failed": 0, "cancelled": 0})
    """Jobs by how they ended."""
    _deaths: dict[int, int] = field(default_factory=dict, init=False)
    _careful: bool = field(default=False, init=False)
    """Whether jobs run one at a time, because the engine died during one of several."""

    async def run(self) -> None:
        """Work until cancelled. Raises only CancelledError."""
        path = self.jobs.media.database.path
        await work_elected(path, self._work, lambda: self.jobs.changed(self.pause), "videos")

    async def _work(self) -> None:
        """Do jobs until the store fails."""
        await self.jobs.resume()
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                most = 1 if self._careful else _TOGETHER
                job = await self.jobs.take() if len(running) < most and self.ready() else None
                if job is not None:
                    running.add(asyncio.create_task(self._do(job), name=job.id))
                    continue
                news = asyncio.create_task(self.jobs.changed(self.pause))
                await asyncio.wait({news, *running}, return_when=asyncio.FIRST_COMPLETED)
                await cancel([news])
                done = {task for task in running if task.done()}
                running -= done
                for task in done:
                    task.result()
        finally:
            await cancel(running)

    async def _do(self, job: VideoRecord) -> None:
        """Do a job, and store its outcome. Raises StoreUnavailable."""
        try:
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    await self._generate(job)
                    self._careful = False
                    return
            except TimeoutError:
                raise DeadlineExceeded(self.timeout_seconds) from None
        except StoreUnavailable:
            raise
        except EngineUnavailable as error:
            if not self._hopeless(job, error):
                log.info("a video has to wait: %s", error)
                await self.jobs.end(job.number, "queued")
                await asyncio.sleep(self.pause)
                return
            failure: Exception = error
        except Exception as error:  # of any kind: the job says what it was
            failure = error
        scope: Scope = {"type": "http", "path": "/v1/videos", "state": {"request_id": job.request.request_id}}
        await self.jobs.end(job.number, "failed", error=self.render_error(failure, scope))
        self.ended["failed"] += 1

    async def _generate(self, job: VideoRecord) -> None:
        wanted = asyncio.create_task(self._until_unwanted(job))
        told = ("", -1)
        try:
            async with aclosing(self.engine.generate(job.request)) as news:
                wanted.add_done_callback(lambda _: news.close())
                async for delta in news:
                    if delta.stage == "file":
                        file = await self._stored(job, delta.data)
                        await self.jobs.end(job.number, "completed", file, progress=100)
                        self.ended["completed"] += 1
                        return
                    if told != (now := (delta.stage, delta.progress)):
                        told = now
                        await self.jobs.note(job.number, *now)
            await wanted
            self.ended["cancelled"] += 1
        finally:
            await cancel([wanted])

    async def _stored(self, job: VideoRecord, data: bytes) -> str:
        """Store the file of a job, and return its name. Raises EngineFailure if it cannot be stored: another attempt
        would not change that."""
        try:
            return (await self.jobs.media.put(job.owner, data, job.request.format)).name
        except StoreUnavailable as error:
            raise EngineFailure("The video was made, but cannot be stored.") from error

    async def _until_unwanted(self, job: VideoRecord) -> None:
        """Wait until a client has cancelled or deleted the job."""
        while await self.jobs.wanted(job.number):
            await self.jobs.changed(self.pause)

    def _hopeless(self, job: VideoRecord, error: Exception) -> bool:
        """Count a death of the engine during a job, and return whether the job has failed for good."""
        if not isinstance(error, EngineDied):
            return False
        self._deaths[job.number] = self._deaths.get(job.number, 0) + 1
        self._careful = self._deaths[job.number] < _MOST_DEATHS
        return not self._careful
