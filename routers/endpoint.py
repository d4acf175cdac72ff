"""A generating API as a record, from which its route, its OpenAPI entry and the router's proxy are made. Streamed
answers are server-sent events. sse-starlette's response provides the headers; sending is our own.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from multimodal.answers.shapes import Shape
from multimodal.request import Ask
from protocol.common import ModelFields
from protocol.errors import ErrorEnvelope
from routers.body import converted, disconnect, json_body, request_body, while_connected
from routers.state import ChatService, ChatServiceDep, DpRank, RequestId, StateDep

B = TypeVar("B", bound=ModelFields)


class Framing:
    """The framing of an API's stream: events of data alone, then `[DONE]`, as OpenAI's chat and completions do.

    An API that names its events, or ends in another way, has a subclass.
    """

    described = (
        "The JSON of one event's `data:` line. After the last chunk comes `data: [DONE]`, but after an error nothing."
    )
    """Description in the OpenAPI document."""
    end = b"data: [DONE]\n\n"
    """Sent after the last event, unless that is an error."""
    keep_alive = b": keep-alive\n\n"
    """Sent when the stream has been silent for the ping interval."""

    def event(self, payload: bytes) -> bytes:
        """Frame a JSON document, which may be an error envelope."""
        return b"data: " + payload + b"\n\n"


class NamedEvents(Framing):
    """Events named by their `type`, with which every payload begins."""

    described = "The JSON of one event's `data:` line. The line `event:` before it repeats its `type`."

    def event(self, payload: bytes) -> bytes:
        start = len(b'{"type":"')
        return b"event: %b\ndata: %b\n\n" % (payload[start : payload.index(b'"', start)], payload)


OPENAI = Framing()


@dataclass(frozen=True, kw_only=True)
class Endpoint(Generic[B]):
    """One generating API. A new one is its wire types in `protocol/`, a file here with its record, and a place in
    `ENDPOINTS`.
    """

    path: str
    name: str
    """Summary of the operation in the OpenAPI document."""
    summary: str
    description: str
    body: type[B]
    answer: type[BaseModel]
    """The answer that is not streamed, for the OpenAPI document."""
    chunk: str
    """Name of the class in `protocol/chunks.py` that describes an event of a streamed answer."""
    convert: Callable[[B], Ask]
    """Return the neutral request of a body. Raises RequestError."""
    shape: type[Shape]
    framing: Framing = OPENAI
    error: type[BaseModel] = ErrorEnvelope
    """The envelope of errors, for the OpenAPI document (`server/http/errors.py` renders them)."""

    def router(self) -> APIRouter:
        """Return a router with this route."""
        router = APIRouter(tags=["generation"])
        parse = json_body(self.body)

        @router.post(
            self.path,
            name=self.name,
            response_model=self.answer,
            summary=self.summary,
            description=self.description,
            responses={"4XX": {"model": self.error}, "5XX": {"model": self.error}},
            openapi_extra=request_body(self.body),
        )
        async def generate(
            request: Request,
            state: StateDep,
            service: ChatServiceDep,
            request_id: RequestId,
            dp_rank: DpRank,
            body: Annotated[Any, Depends(parse)],
        ) -> Response:

            def convert() -> Ask:
                service.fields.check(body)
                return self.convert(body)

            ask = await converted(state, convert)
            if not ask.stream:
                content = await while_connected(request, self._complete(service, ask, request_id, dp_rank))
                return Response(content, media_type="application/json")
            generation = await while_connected(request, service.processor.prepare(ask, self.shape, request_id, dp_rank))
            return EventStream(generation.stream(), self.framing, state["http"].ping_interval, state["render_error"])

        return router

    async def _complete(self, service: ChatService, ask: Ask, request_id: str, dp_rank: int | None) -> bytes:
        return await (await service.processor.prepare(ask, self.shape, request_id, dp_rank)).complete()


class EventStream(EventSourceResponse):
    """A stream of JSON `payloads`, which ends with an error event if they fail midway. The status waits for the first
    payload: an exception before it is raised from here, with nothing sent. Payloads are closed as soon as the client
    has gone; ClientDisconnect is raised if that is before the first. Events are sent without a lock, a timer or a log
    line for each, keep-alives in silence only. A shutdown lets streams run (`server/process/serving.py` waits for
    them).
    """

    def __init__(
        self,
        payloads: AsyncGenerator[bytes, None],
        framing: Framing,
        ping_interval: float,
        render_error: Callable[[Exception, Scope], bytes],
    ) -> None:
        super().__init__(payloads, headers={"Cache-Control": "no-cache"}, ping=ping_interval)
        self._payloads = payloads
        self._framing = framing
        self._render_error = render_error
        self._started = False
        self._last_sent = math.inf
        """Time of the last event by the loop's clock; infinite until the headers are sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_events(scope, send))
        gone = asyncio.create_task(disconnect(receive))
        tasks: list[asyncio.Task[Any]] = [sending, gone]
        if self.ping_interval:
            tasks.append(asyncio.create_task(self._keep_alive(send)))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not sending.cancelled():
            await send({"type": "http.response.body", "body": sending.result(), "more_body": False})
        elif not self._started:
            raise ClientDisconnect

    async def _send_events(self, scope: Scope, send: Send) -> bytes:
        """Send the events, and return the end of the stream, which is not sent yet."""
        clock = asyncio.get_running_loop().time
        frame = self._framing.event
        async with aclosing(self._payloads) as payloads:
            payload = await anext(payloads)
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await send({"type": "http.response.body", "body": frame(payload), "more_body": True})
                self._last_sent = clock()
                async for payload in payloads:
                    await send({"type": "http.response.body", "body": frame(payload), "more_body": True})
                    self._last_sent = clock()
            except Exception as error:  # whatever it was: the client must not take the stream for complete
                return frame(self._render_error(error, scope))
        return self._framing.end

    async def _keep_alive(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        silence = 0.0
        while True:
            await asyncio.sleep(self.ping_interval - silence)
            silence = max(clock() - self._last_sent, 0.0)
            if silence >= self.ping_interval:
                await send({"type": "http.response.body", "body": self._framing.keep_alive, "more_body": True})
                silence = 0.0
                self._last_sent = clock()
