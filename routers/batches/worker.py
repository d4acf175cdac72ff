"""Works through the batches of messages, at the lowest priority and a few requests at a time."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from uuid import uuid4

from starlette.types import Scope

from engine.errors import EngineDied, EngineUnavailable
from engine.kit.tasks import cancel
from engine.kit.work import begin_request, off_loop
from multimodal.answers.messages import MessageShape
from multimodal.errors import RequestError
from multimodal.processor import Processor
from multimodal.request import Ask
from protocol.messages import MessagesRequest
from routers.batches.store import BatchJob, BatchStore
from routers.body import parsed
from routers.database import StoreUnavailable, told, work_elected
from routers.fields import FieldCheck
from routers.messages import ENDPOINT, convert

_LOWEST = 1000
"""Priority of all requests; a request waits as if it had come that many times 10 seconds later."""

_MOST_DEATHS = 3
"""Number of deaths of the engine during a request after which the request has failed."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class BatchWorker:
    """Answers the requests of all batches. Of several processes with the same store, one works at a time; when it ends,
    another takes over.
    """

    store: BatchStore
    processor: Processor
    fields: FieldCheck
    max_text_bytes: int
    max_values: int
    """Maximum number of values in a body; bodies that come by HTTP have the same limit."""
    render_error: Callable[[Exception, Scope], bytes]
    concurrency: int
    ready: Callable[[], bool]
    """Return whether the replica accepts requests."""
    pause: float = 1.0
    """Seconds between checks for batches of other processes, and for the lock if another process is working."""
    _deaths: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    """Number of deaths of the engine while it served each request."""

    async def run(self) -> None:
        """Work until cancelled. Raises only CancelledError."""
        await work_elected(self.store.path, self._work, self._pause, "batches of messages")

    async def _work(self) -> None:
        """Answer requests until the store fails."""
        await self.store.resume()
        running: set[asyncio.Task[bool]] = set()
        try:
            while True:
                job = await self.store.take() if len(running) < self.concurrency and self.ready() else None
                if job is not None:
                    running.add(asyncio.create_task(self._do(job), name=f"batch-{job.batch}-{job.place}"))
                    continue
                news = asyncio.create_task(self._pause())
                await asyncio.wait({news, *running}, return_when=asyncio.FIRST_COMPLETED)
                await cancel([news])
                ended = {task for task in running if task.done()}
                running -= ended
                done = [task.result() for task in ended]
                if not all(done):  # the engine takes no more for now
                    await asyncio.sleep(self.pause)
        finally:
            await cancel(running)

    async def _pause(self) -> None:
        """Wait until there may be something to do."""
        await told(self.store.news, self.pause)

    async def _do(self, job: BatchJob) -> bool:
        """Answer a request and store its result; return False if it has to be repeated. Raises StoreUnavailable."""
        begin_request()
        request_id = uuid4().hex
        try:
            result = b'{"type":"succeeded","message":%b}' % await self._answer(job.params, request_id)
            if await self.store.finish(job, "succeeded", result):
                return True
            raise RequestError("The store of batches is full.", None, "batch_store_full")
        except StoreUnavailable:
            raise
        except EngineUnavailable as error:
            if not self._hopeless(job, error):
                log.info("a request of a batch has to wait: %s", error)
                await self.store.put_back(job)
                return False
            failure: Exception = error
        except Exception as error:  # of any kind: the result says what it was
            failure = error
        scope: Scope = {"type": "http", "path": ENDPOINT.path, "state": {"request_id": request_id}}
        result = b'{"type":"errored","error":%b}' % self.render_error(failure, scope)
        return await self.store.finish(job, "errored", result)

    def _hopeless(self, job: BatchJob, error: Exception) -> bool:
        """Count a death of the engine during a request, and return whether the request has failed for good."""
        if isinstance(error, EngineDied):
            place = (job.batch, job.place)
            self._deaths[place] = self._deaths.get(place, 0) + 1
            return self._deaths[place] >= _MOST_DEATHS
        return False

    async def _answer(self, params: bytes, request_id: str) -> bytes:
        body = await parsed(MessagesRequest, params, self.max_text_bytes, self.max_values)
        if body.stream:
            raise RequestError("'stream' must be false in a batch.", "stream")

        def request() -> Ask:
            self.fields.check(body)
            return replace(convert(body), priority=_LOWEST)

        ask = await off_loop(len(params), request)
        return await (await self.processor.prepare(ask, MessageShape, request_id)).complete()
