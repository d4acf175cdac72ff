"""The router's WebSocket of /v1/responses: a connection to one replica, which its first message chooses.

Until the replica has sent an event, the client has seen nothing, and another one may be asked. After that the
connection stays with this replica, which remembers its responses. If one side closes it, so does the other.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import orjson
from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from engine.errors import EngineDied, EngineError, EngineNotReady
from engine.kit.tasks import cancel
from engine.replicas.client import ConnectionFailed, WebSocketRefused
from engine.replicas.routing.load import UNKNOWN_TOKENS, Assignment
from engine.replicas.routing.replica import RoutedRank
from engine.replicas.routing.sessions import Affinity
from protocol.responses import ResponseCreate
from routers.proxy.http import ELSEWHERE, REFUSALS, headers_for, noted, read, target_of
from routers.responses.convert import convert
from routers.responses.routes import PATH
from routers.responses.websocket import check_room, error_event, in_lane
from routers.state import MessageClock, RouterService, State

_LAST = tuple(
    f'{{"type":"{kind}"' for kind in ("response.completed", "response.incomplete", "response.failed", "error")
)
"""Beginnings of the last event of a response."""
_CREATED = '{"type":"response.created"'
_NO_CODE, _ABNORMAL, _GOING_AWAY, _RESTART, _BAD_GATEWAY = 1005, 1006, 1001, 1012, 1014
_MOST_REASON = 120
"""Bytes of the reason in a close frame, of 123 that fit."""

router = APIRouter(tags=["router"])


@router.websocket(PATH)
async def connect(websocket: WebSocket) -> None:
    """Pass one connection on to its end."""
    await websocket.accept()
    await _WebSocketRelay(websocket).run()


@dataclass(eq=False)
class _OpenTurn:
    """A message of the client whose last event is pending."""

    lane: str | None
    clock: MessageClock
    work: Assignment | None = None
    """The load that it puts on its replica, once it has been sent there."""


class _Named(msgspec.Struct):
    """The fields of messages and events that the router reads."""

    stream_id: Any = None


class _WebSocketRelay:
    """One connection, and its other half to a replica."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._scope = websocket.scope
        self._state = cast(State, websocket.scope["state"])
        self._router: RouterService = websocket.scope["state"]["service"]
        self._fleet = self._router.fleet
        self._turns: list[_OpenTurn] = []
        """The oldest first."""
        self._count = 0
        self._unanswered: list[str | bytes] | None = []
        """Messages that may go to another replica; None once one has answered."""
        self._asked = asyncio.Event()
        """Set while `_unanswered` has messages."""
        self._rank: RoutedRank | None = None
        self._upstream: ClientConnection | None = None
        """The connection to the replica, once it has all earlier messages."""
        self._closed = _GOING_AWAY, ""
        """Code and reason with which the client closed the connection."""

    async def run(self) -> None:
        """Serve the connection until its client or its replica closes it."""
        reading, serving = asyncio.create_task(self._read()), asyncio.create_task(self._serve())
        try:
            await asyncio.wait((reading, serving), return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, serving):
                if task.done():
                    task.result()
        finally:
            await cancel([reading, serving])
            self._end_turns("cancelled")
            if self._upstream is not None:
                await self._upstream.close(*self._closed)

    async def _read(self) -> None:
        """Pass on the client's messages until the connection ends."""
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            text: str | None = message.get("text")
            payload: str | bytes = message["bytes"] if text is None else text
            self._count += 1
            request_id = f"{self._scope['state']['request_id']}-{self._count}"
            turn = _OpenTurn(_lane_of(payload), self._state["begin_message"](self._scope, request_id, len(payload)))
            try:
                self._begin(turn, payload)
            except Exception as error:  # of any kind: the client is told
                await self._fail(turn, error)
                continue
            if self._upstream is not None:
                with suppress(ConnectionClosed):  # `_serve` sees it, too
                    await self._upstream.send(payload)
        code: int = message.get("code", _NO_CODE)
        self._closed = _GOING_AWAY if code in (_NO_CODE, _ABNORMAL) else code, message.get("reason") or ""

    def _begin(self, turn: _OpenTurn, payload: str | bytes) -> None:
        """Accept a message. Raises EngineNotReady during a shutdown, and RequestError if too many wait."""
        if self._unanswered is not None:
            check_room(self._state, map(len, self._unanswered), len(payload))
        self._state["replica"].enter()
        self._turns.append(turn)
        if self._unanswered is not None:
            self._unanswered.append(payload)
            self._asked.set()
        if self._upstream is not None:
            self._assign(turn)

    async def _serve(self) -> None:
        """Find a replica that answers, and pass on its messages until it closes the connection."""
        while self._unanswered is not None:
            await self._asked.wait()
            first = self._unanswered[0]
            raw = first.encode() if isinstance(first, str) else first
            prompt, affinity = await read(self._router, self._state, self._scope, raw, ResponseCreate, convert)
            refusal: dict[str, Any] | None = None
            error: EngineError = EngineNotReady("No replica is ready any more.")
            for rank, work in self._fleet.assign(prompt, affinity):
                try:
                    refusal = await self._exchange(rank, work)
                except ConnectionFailed as failure:
                    error = EngineDied("The replicas that were asked did not answer.")
                    rank.replica.fail(failure)
                    self._unassign("unreachable")
                    continue
                if refusal is None:
                    return
                if not _may_differ(refusal):
                    break
            await self._refuse(refusal, error, affinity)

    async def _exchange(self, rank: RoutedRank, work: Assignment) -> dict[str, Any] | None:
        """Ask a replica and pass on its events to the end of the connection; then return None. If the replica refuses
        the first message, its refusal is returned. Raises ConnectionFailed if it does not answer.
        """
        self._rank = rank
        self._turns[0].work = work
        for turn in self._turns[1:]:
            self._assign(turn)
        try:
            headers = [header for header in headers_for(self._router, rank, self._scope) if header[0] != b"origin"]
            upstream = await rank.replica.client.websocket(target_of(self._scope), headers)
        except WebSocketRefused as refused:
            self._unassign("refused")
            return _event_of(refused)
        try:
            event = await self._first_event(upstream)
            if len(self._turns) == 1 and event.startswith(_LAST[-1]):
                refusal: dict[str, Any] = orjson.loads(event)
                if _may_differ(refusal):
                    self._unassign("refused")
                    return refusal
            rank.replica.breaker.succeed()
            self._unanswered = None
            while True:
                self._take(event, rank)
                await self._websocket.send_text(event)
                event = await _received(upstream)
        except ConnectionClosed as closed:
            code, reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd is not None else (_ABNORMAL, "")
            if self._unanswered is not None and code in (_ABNORMAL, _GOING_AWAY, _RESTART):
                raise ConnectionFailed("the replica closed the connection") from closed
            await self._close(rank, code, reason)
            return None
        except WebSocketDisconnect:  # the client has gone, and `_read` sees it, too
            return None
        finally:
            if self._unanswered is not None:
                self._upstream = None
                await upstream.close()

    async def _first_event(self, upstream: ClientConnection) -> str:
        """Send the waiting messages, and return the replica's first event. Raises ConnectionClosed."""
        sent = 0
        while self._unanswered is not None and sent < len(self._unanswered):
            await upstream.send(self._unanswered[sent])
            sent += 1
        self._upstream = upstream
        return await _received(upstream)

    async def _close(self, rank: RoutedRank, code: int, reason: str) -> None:
        """Close the connection as the replica has closed the other half, or report that it was lost."""
        if code == _ABNORMAL and self._state["replica"].draining:  # the router ends its connections to replicas
            code = _RESTART
        elif code == _ABNORMAL:
            rank.replica.check()
            reason = "The replica was lost."
        lost = EngineDied("The replica was lost while it answered.")
        for turn in list(self._turns):
            await self._fail(turn, lost, "lost")
        code = {_ABNORMAL: _BAD_GATEWAY, _NO_CODE: 1000}.get(code, code)
        with suppress(WebSocketDisconnect, RuntimeError):  # the client has closed it meanwhile
            await self._websocket.close(code, reason.encode()[:_MOST_REASON].decode(errors="ignore"))

    async def _refuse(self, refusal: dict[str, Any] | None, error: EngineError, affinity: Affinity) -> None:
        """Send the error of the first waiting message, which all replicas have refused, or that no replica answers; the
        connection stays open.
        """
        assert self._unanswered is not None
        refused = self._turns[:1] if refusal is not None else list(self._turns)
        del self._unanswered[: len(refused)]
        if not self._unanswered:
            self._asked.clear()
        if refusal is not None and refusal["error"].get("code") in ELSEWHERE and self._fleet.is_away(affinity):
            refusal, error = None, EngineNotReady("The replica that stores the response is not ready.")
        for turn in refused:
            if refusal is None:
                await self._fail(turn, error)
            else:
                self._end(turn, refusal["status"])
                shown = {name: value for name, value in refusal.items() if name != "stream_id"}
                await self._send(in_lane(orjson.dumps(shown), turn.lane))

    def _take(self, event: str, rank: RoutedRank) -> None:
        """Note the effect of an event on the running responses."""
        if event.startswith(_CREATED):
            noted(self._fleet, rank.replica, event.encode())
        if not event.startswith(_LAST):
            if self._turns and self._turns[0].work is not None:
                self._turns[0].work.answered()
            return
        lane = _lane_of(event) if any(turn.lane is not None for turn in self._turns) else None
        turn = next((turn for turn in self._turns if turn.lane == lane), self._turns[0] if self._turns else None)
        if turn is not None:  # else the replica says that the connection is too old
            status = orjson.loads(event)["status"] if event.startswith(_LAST[-1]) else 200
            self._end(turn, status, "error" if status >= 500 else "ok")

    def _assign(self, turn: _OpenTurn) -> None:
        assert self._rank is not None
        turn.work = Assignment(self._rank.load, UNKNOWN_TOKENS, 0)

    def _unassign(self, outcome: str) -> None:
        """Note that a replica has not answered, which ends its work."""
        assert self._rank is not None
        for turn in self._turns:
            if turn.work is not None:
                turn.work.end()
                turn.work = None
                self._fleet.observer.answered(self._rank.replica.number, outcome)

    def _end(self, turn: _OpenTurn, status: int | None, outcome: str = "refused") -> None:
        """End a message that has been answered; without a status, its client has gone."""
        self._turns.remove(turn)
        self._state["replica"].leave()
        if turn.work is not None and self._rank is not None:
            turn.work.end()
            self._fleet.observer.answered(self._rank.replica.number, outcome)
        if status is not None:
            turn.clock.status = status
        turn.clock.end()

    def _end_turns(self, outcome: str) -> None:
        for turn in list(self._turns):
            self._end(turn, None, outcome)

    async def _fail(self, turn: _OpenTurn, error: Exception, outcome: str = "refused") -> None:
        status = self._state["status_of"](error)
        if turn in self._turns:
            self._end(turn, status, outcome)
        else:
            turn.clock.status = status
            turn.clock.end()
        await self._send(in_lane(error_event(self._state, self._scope, error), turn.lane))

    async def _send(self, event: bytes) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):  # the client has closed the connection
            await self._websocket.send_text(event.decode())


async def _received(upstream: ClientConnection) -> str:
    event = await upstream.recv()
    return event if isinstance(event, str) else event.decode()


def _lane_of(message: str | bytes) -> str | None:
    try:
        lane = msgspec.json.decode(message, type=_Named).stream_id
    except msgspec.MsgspecError:
        return None
    return lane if isinstance(lane, str) else None


def _may_differ(refusal: dict[str, Any]) -> bool:
    """Return whether another replica may accept a message that this one refuses."""
    return refusal["status"] in REFUSALS or refusal["error"].get("code") in ELSEWHERE


def _event_of(refused: WebSocketRefused) -> dict[str, Any]:
    """Return the event for a replica's answer to the handshake."""
    try:
        error = orjson.loads(refused.body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        error = {"message": str(refused), "type": "server_error", "param": None, "code": None}
    return {"type": "error", "status": refused.status, "error": error}
