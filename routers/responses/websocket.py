"""The WebSocket mode of /v1/responses: each message requests a response, whose events are messages."""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, cast

import orjson
from fastapi import APIRouter, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.types import Message, Scope
from starlette.websockets import WebSocketDisconnect

from engine import trace
from engine.kit import logs
from engine.kit.tasks import cancel
from engine.kit.work import begin_request
from multimodal.errors import RequestError
from protocol.responses import ResponseCreate
from routers.body import parsed
from routers.responses.routes import PATH, PreparedResponse, events, failure, prepare
from routers.responses.service import recorded, size_of
from routers.responses.store import Record
from routers.state import ChatService, MessageClock, State

MAX_SECONDS = 3600.0
"""Seconds for which a connection takes new requests."""
MAX_TURNS = 16
"""Responses that run or wait on a connection."""
MAX_LANES = 32
"""Number of named lanes of a connection, in addition to the one without a name."""
MAX_KEPT = 32
"""Number of unstored responses that a connection remembers, so that they can be continued on it."""
_LIMIT = "websocket_connection_limit_reached"
_FULL = "websocket_stream_limit_reached"

router = APIRouter(tags=["responses"])


@router.websocket(PATH)
async def connect(websocket: WebSocket) -> None:
    """Serve one connection to its end."""
    await websocket.accept()
    await Session(websocket).run()


class Session:
    """One connection. Each lane has one response at a time; lanes run concurrently.

    A failure becomes an `error` message, after which the connection goes on. Its end cancels running responses.
    """

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._state = cast(State, websocket.scope["state"])
        self._request_id: str = websocket.scope["state"]["request_id"]
        self._owner: str = websocket.scope["state"].get("owner", "")
        self._dp_rank: int | None = websocket.scope["state"].get("dp_rank")
        self._lanes: dict[str | None, asyncio.Task[None]] = {}
        """The last response of each lane."""
        self._turns: dict[asyncio.Task[None], int] = {}
        """Responses that run or wait, and the bytes of their requests."""
        self._count = 0
        self._kept: dict[str, list[Record]] = {}
        """Responses that are not stored, each after those that it continues; the oldest first."""
        self._expired = False

    async def run(self) -> None:
        """Serve the connection until its client closes it, or it is too old and nothing runs."""
        receiving = asyncio.create_task(self._receive())
        ending: set[asyncio.Task[Any]] = {receiving}
        try:
            await asyncio.wait(ending, timeout=MAX_SECONDS)
            self._expired = True
            while not receiving.done() and self._turns:
                await asyncio.wait({receiving, *self._turns}, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
                return
            await self._fail(_too_old())
            with suppress(WebSocketDisconnect, RuntimeError):  # it has closed the connection meanwhile
                await self._websocket.close(1001)
        finally:
            await cancel([receiving, *self._turns])

    async def _receive(self) -> None:
        """Begin responses until the connection ends."""
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            lane: str | None = None
            raw = (message.get("text") or "").encode()
            self._count += 1
            request_id = f"{self._request_id}-{self._count}"
            clock = self._state["begin_message"](self._websocket.scope, request_id, len(raw))
            try:
                body = await self._parsed(message, raw)
                lane = body.stream_id
                self._begin(body, len(raw), request_id, clock)
            except Exception as error:  # of any kind: the client is told
                clock.status = self._state["status_of"](error)
                clock.end()
                await self._fail(error, lane or _lane_of(error))

    async def _parsed(self, message: Message, raw: bytes) -> ResponseCreate:
        if message.get("text") is None:
            raise RequestError("Messages must be JSON in text frames.")
        options = self._state["http"]
        return await parsed(ResponseCreate, raw, options.max_text_bytes, options.max_values)

    def _begin(self, body: ResponseCreate, size: int, request_id: str, clock: MessageClock) -> None:
        """Begin a response after those before it in its lane."""
        if self._expired:
            raise _too_old()
        if body.background:
            raise RequestError("WebSockets have no 'background'.", "background", "unsupported_parameter")
        check_room(self._state, self._turns.values(), size)
        named = self._lanes.keys() - {None}
        if body.stream_id not in {None, *named} and len(named) >= MAX_LANES:
            raise RequestError(f"A connection has at most {MAX_LANES} lanes.", "stream_id", _FULL)
        task = asyncio.create_task(self._turn(body, size, request_id, clock, self._lanes.get(body.stream_id)))
        self._lanes[body.stream_id] = task
        self._turns[task] = size
        task.add_done_callback(lambda _: clock.end())
        task.add_done_callback(self._turns.pop)

    async def _turn(
        self,
        body: ResponseCreate,
        size: int,
        request_id: str,
        clock: MessageClock,
        before: asyncio.Task[None] | None,
    ) -> None:
        """Answer one message, once the one `before` it has been answered."""
        if before is not None:
            await asyncio.wait((before,))
        before = None
        logs.request_id.set(request_id)
        trace.current.set(clock.span)
        begin_request()
        replica = self._state["replica"]
        try:
            service = cast(ChatService, replica.enter())
            try:
                await self._answer(body, service, request_id, size)
                clock.status = 200
            finally:
                replica.leave()
        except Exception as error:  # of any kind: the client is told
            clock.status = self._state["status_of"](error)
            self._forget(body)
            await self._fail(error, body.stream_id)

    async def _answer(self, body: ResponseCreate, service: ChatService, request_id: str, size: int) -> None:
        state = cast(State, {**self._state, "body_bytes": size})
        prepared = await prepare(state, service, body, self._owner, request_id, self._dp_rank, self._kept)
        error_of = partial(failure, state, self._websocket.scope)
        async with aclosing(events(service.responses, prepared, error_of)) as payloads:
            async for event in payloads:
                if prepared.shape.ended:
                    self._keep(body, prepared)  # the client may continue it once it has the last event
                await self._send(event, body.stream_id)

    def _keep(self, body: ResponseCreate, prepared: PreparedResponse) -> None:
        """Remember a response that is not stored."""
        record = recorded(prepared.record, prepared.shape)
        if record.status == "failed":
            self._forget(body)
            return
        if prepared.shape.stored:
            return
        self._kept[record.id] = [*prepared.earlier, record]
        while self._kept and (len(self._kept) > MAX_KEPT or self._kept_bytes() > self._state["http"].max_body_bytes):
            del self._kept[next(iter(self._kept))]

    def _kept_bytes(self) -> int:
        return size_of({record.id: record for chain in self._kept.values() for record in chain}.values())

    def _forget(self, body: ResponseCreate) -> None:
        """Forget the response that a failed one continues, as the protocol requires."""
        self._kept.pop(body.previous_response_id or "", None)

    async def _fail(self, error: Exception, lane: str | None = None) -> None:
        await self._send(error_event(self._state, self._websocket.scope, error), lane)

    async def _send(self, event: bytes, lane: str | None) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):  # the connection has ended, and `run` is about to see it
            await self._websocket.send_text(in_lane(event, lane).decode())


def check_room(state: State, sizes: Iterable[int], size: int) -> None:
    """Raise RequestError if a connection with requests of `sizes` bytes has no room for one of `size` bytes."""
    waiting = list(sizes)
    most = state["http"].max_body_bytes
    if len(waiting) >= MAX_TURNS or (waiting and sum(waiting) + size > most):
        said = f"At most {MAX_TURNS} responses, and {most} bytes of requests, run or wait on a connection."
        raise RequestError(said, None, _FULL)


def error_event(state: State, scope: Scope, error: Exception) -> bytes:
    """Return the error event of a request."""
    rendered = orjson.loads(state["render_error"](error, scope))["error"]
    return orjson.dumps({"type": "error", "status": state["status_of"](error), "error": rendered})


def in_lane(event: bytes, lane: str | None) -> bytes:
    """Return an event as one of a lane."""
    return event if lane is None else b'%b,"stream_id":%b}' % (event[:-1], orjson.dumps(lane))


def _too_old() -> RequestError:
    said = f"The connection has reached its limit of {MAX_SECONDS / 60:g} minutes: open another."
    return RequestError(said, None, _LIMIT)


def _lane_of(error: Exception) -> str | None:
    """Return the lane of an invalid request, if it names one."""
    body = error.body if isinstance(error, RequestValidationError) else None
    lane = body.get("stream_id") if isinstance(body, dict) else None
    return lane if isinstance(lane, str) and 0 < len(lane) <= 128 else None
