"""The router's own route: everything under /v1 is forwarded to a replica, and its answer passed on as it arrives. Until
the first bytes of a stream, or the whole of another answer, have arrived, the client has seen nothing and another
replica may be asked. If a stream breaks off later, the client gets its complete lines and an error event.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from engine import trace
from engine.errors import EngineAsleep, EngineDied, EngineFailure, EngineNotReady
from engine.replicas.client import AnswerTooLong, ConnectionFailed, Header, ReplicaConnection
from engine.replicas.routing.fleet import Fleet, RoutedPrompt
from engine.replicas.routing.load import Assignment
from engine.replicas.routing.replica import RoutedRank, RoutedReplica
from engine.replicas.routing.sessions import Affinity
from multimodal.errors import RequestError
from multimodal.request import Ask
from protocol.responses import CompactRequest, ContextFields, InputTokensRequest
from routers.batches.routes import PATH as BATCHES_PATH
from routers.body import converted, disconnect, parsed, read_body, while_connected
from routers.endpoint import OPENAI, Framing
from routers.endpoints import ENDPOINTS
from routers.messages import COUNT_PATH
from routers.responses import routes as responses
from routers.responses.convert import conversation_of
from routers.responses.service import is_reference, response_of
from routers.state import DP_RANK_HEADER, INTERNAL_HEADER, RouterService, RouterServiceDep, State, state_of
from routers.tokenize import PATHS
from routers.transcriptions import PATHS as AUDIO_PATHS
from routers.visual import images, videos

router = APIRouter(tags=["router"])

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_PATH_SAFE = "/:@!$&'()*+,;=~-._"
_MAX_SESSION = 1 << 10
REFUSALS = frozenset({429, 503})
"""Statuses at which another replica is asked."""
ELSEWHERE = (
    *("response_not_found", "previous_response_not_found", "item_not_found"),
    *("video_not_found", "file_not_found", "batch_not_found"),
)
"""Codes of errors about stored objects, which another replica may have."""
_ELSEWHERE = tuple(b'code":"%b"' % code.encode() for code in ELSEWHERE)  # `code`, and Anthropic's `error_code`
_ASLEEP = b'"code":"asleep"'
_STORED = re.compile(
    rf"(?:{responses.PATH}/(?=resp_)|{videos.PATH}/(?=video_)|{BATCHES_PATH}/(?=msgbatch_)|{images.FILES_PATH}/)([^/]+)"
)
"""A path that names a stored response, a video, a batch or the file of a picture."""
_ID = re.compile(rb'"id":"((?:resp|video|msgbatch)_[0-9a-f]+)"')
_ID_WITHIN = 1 << 10
"""Bytes of an answer, or of the first event, that contain the id of the response, video or batch."""
_RESULTS = re.compile(rf'(?<="results_url":")[^"]*(?={BATCHES_PATH}/)'.encode())
_FILE = re.compile(rf'"url":"[^"]*{images.FILES_PATH}/([^"/]+)"'.encode())
_FILES_WITHIN = 1 << 16
"""Bytes of an answer with the URLs of pictures; one with the pictures themselves is larger."""
_BODIES: dict[str, tuple[type[BaseModel], Callable[[Any], Ask] | None]] = {
    **{endpoint.path: (endpoint.body, endpoint.convert) for endpoint in ENDPOINTS},
    responses.PATHS[0]: (InputTokensRequest, None),
    responses.PATHS[1]: (CompactRequest, None),
}
"""Bodies that the router reads, and the conversion into the neutral request for those that generate tokens."""
_REPLICA_HEADER = b"x-trellis-replica"
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"}
    | {b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"sec-websocket-key"}
    | {b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol"}
)
_MADE_ANEW = frozenset(
    {b"content-length", b"date", b"server", b"host", b"x-request-id"}
    | {_REPLICA_HEADER, DP_RANK_HEADER, INTERNAL_HEADER}
)
_MAX_ANSWER = 256 << 20
"""Maximum bytes of an answer that is not a stream, which is kept until it is whole."""

log = logging.getLogger(__name__)


async def forward(request: Request, service: RouterServiceDep) -> Response:
    """Answer with the answer of a replica."""
    body = await read_body(request, state_of(request)["http"]) if request.method == "POST" else b""
    return await while_connected(request, _Exchange(request, service, body).answer())


for _path in (
    *(endpoint.path for endpoint in ENDPOINTS),
    COUNT_PATH,
    *responses.PATHS,
    *PATHS,
    *AUDIO_PATHS,
    *images.PATHS,
    videos.PATH,
    videos.SYNC_PATH,
):  # added first, so that metrics and traces name them
    router.add_api_route(_path, forward, methods=["POST"], include_in_schema=False)
router.add_api_route("/v1/{path:path}", forward, methods=["GET", "POST", "DELETE"], include_in_schema=False)


class _Exchange:
    """One request, sent to one replica after the other until one answers."""

    def __init__(self, request: Request, router: RouterService, body: bytes) -> None:
        self._request = request
        self._router = router
        self._fleet = router.fleet
        self._body = body
        self._path = path_of(request.scope)

    async def answer(self) -> Response:
        """Return the answer, whole or as a stream that has begun. Raises EngineUnavailable."""
        prompt, affinity = await self._read()
        refusal: Response | None = None
        failed = False
        for attempt, (rank, work) in enumerate(self._fleet.assign(prompt, affinity), 1):
            try:
                response = await self._ask(rank, work, attempt)
            except ConnectionFailed as error:
                log.info("%s did not answer: %s", rank.replica.name, error)
                failed = True
                continue
            if response.status_code not in REFUSALS and not _is_elsewhere(response):
                return response
            refusal = response
        if refusal is not None and _is_elsewhere(refusal) and self._fleet.is_away(affinity):
            raise EngineNotReady("The replica that stores this is not ready.")
        if refusal is not None:
            return refusal
        if failed:
            raise EngineDied("The replicas that were asked did not answer.")
        raise EngineNotReady(self._fleet.missing or "No replica is ready any more.")

    async def _read(self) -> tuple[RoutedPrompt, Affinity]:
        """Return the prompt of a request, empty unless it generates, and its affinity to a replica."""
        scope = self._request.scope
        if self._path in _BODIES:
            return await read(self._router, state_of(self._request), scope, self._body, *_BODIES[self._path])
        if self._path == BATCHES_PATH:  # without the session, which may be with another replica than the list
            return RoutedPrompt(count=1), Affinity(conversation=f"{scope['state'].get('owner', '')} batches")
        named = _STORED.match(self._path)
        session = session_of(self._router, scope)
        return RoutedPrompt(count=1), Affinity((named[1],) if named is not None else (), session=session)

    async def _ask(self, rank: RoutedRank, work: Assignment, attempt: int) -> Response:
        """Send the request to a replica. Raises ConnectionFailed."""
        replica = rank.replica
        outcome = "cancelled"
        connection: ReplicaConnection | None = None
        try:
            with trace.span("route", {"trellis.replica": replica.number, "trellis.attempt": attempt}, client=True):
                connection = await replica.client.request(self._head(rank), self._body)
                headers = [*_end_to_end(connection.headers), (_REPLICA_HEADER, b"%d" % replica.number)]
                if _is_stream(connection.headers):
                    first = await connection.chunk()
                    replica.breaker.succeed()
                    work.answered()
                    ends = partial(self._end, replica, work, connection)
                    outcome = ""
                    self._note(replica, connection.status, first)
                    framing = next((one.framing for one in ENDPOINTS if one.path == self._path), OPENAI)
                    return _Relay(connection, first, headers, ends, framing, state_of(self._request)["render_error"])
                content = await connection.body(_MAX_ANSWER)
            outcome = "refused" if connection.status in REFUSALS else "error" if connection.status >= 500 else "ok"
            if connection.status == 503:
                if _ASLEEP in content:
                    replica.set_unready(EngineAsleep("one is asleep"))
                replica.check()  # it may be shutting down
            else:
                replica.breaker.succeed()
            self._note(replica, connection.status, content)
            if self._path in images.PATHS and len(content) < _FILES_WITHIN:
                url = f'"url":"{self._request.base_url}{images.FILES_PATH[1:]}/'.encode()
                content = _FILE.sub(lambda found: b'%b%b"' % (url, found[1]), content)
            elif self._path.startswith(BATCHES_PATH) and not self._path.endswith("/results"):
                content = _RESULTS.sub(str(self._request.base_url).rstrip("/").encode(), content)
            return _WholeAnswer(connection.status, headers, content)
        except AnswerTooLong as error:  # not the replica's fault
            outcome = "error"
            raise EngineFailure(f"The answer has more than {_MAX_ANSWER >> 20} MiB: ask the replica itself.") from error
        except ConnectionFailed as error:
            outcome = "unreachable"
            replica.fail(error)
            raise
        finally:
            if outcome:
                self._end(replica, work, connection, outcome)

    def _note(self, replica: RoutedReplica, status: int, content: bytes) -> None:
        if self._path in (responses.PATH, videos.PATH, BATCHES_PATH) and status in (200, 202):
            noted(self._fleet, replica, content)
        elif self._path in images.PATHS and status == 200 and len(content) < _FILES_WITHIN:
            for name in _FILE.findall(content):
                self._fleet.stored(name.decode(), replica)

    def _end(
        self, replica: RoutedReplica, work: Assignment, connection: ReplicaConnection | None, outcome: str
    ) -> None:
        """Note the end of the work at a replica."""
        work.end()
        if connection is not None:
            replica.client.release(connection)
        if outcome == "lost":
            replica.check()
        self._fleet.observer.answered(replica.number, outcome)

    def _head(self, rank: RoutedRank) -> bytes:
        scope = self._request.scope
        headers = headers_for(self._router, rank, scope)
        return rank.replica.client.head(self._request.method, target_of(scope), headers, len(self._body))


async def read(
    router: RouterService,
    state: State,
    scope: Scope,
    raw: bytes,
    model: type[BaseModel],
    convert: Callable[[Any], Ask] | None,
) -> tuple[RoutedPrompt, Affinity]:
    """Return the prompt of a body, empty if it needs no tokens, and its affinity. A body that cannot be read has
    neither: a replica will refuse it.
    """
    started = time.perf_counter()
    session = session_of(router, scope)
    prompt, affinity = RoutedPrompt(count=1), Affinity(session=session)
    try:
        body = await parsed(model, raw, state["http"].max_text_bytes, state["http"].max_values)
    except RequestValidationError:
        return prompt, affinity
    if isinstance(body, ContextFields | CompactRequest):
        affinity = _affinity(body, scope, session)
    if convert is not None:
        try:
            prompt = await router.prompts.of(await converted(state, lambda: convert(body)))
        except RequestError:
            prompt = RoutedPrompt()
        router.fleet.observer.tokenised(time.perf_counter() - started)
    return prompt, affinity


def _affinity(body: ContextFields | CompactRequest, scope: Scope, session: str) -> Affinity:
    """Return the affinity of a request to Responses: the responses that it continues or refers to."""
    items = body.input if isinstance(body.input, list) else []
    quoted = dict.fromkeys(response_of(item.id or "") for item in items if is_reference(item))
    continued = (body.previous_response_id,) if body.previous_response_id is not None else ()
    conversation = conversation_of(body) if isinstance(body, ContextFields) else None
    owner = scope["state"].get("owner", "")
    return Affinity((*continued, *quoted), f"{owner} {conversation}" if conversation is not None else "", session)


def noted(fleet: Fleet, replica: RoutedReplica, content: bytes) -> None:
    """Note the replica of the response, video or batch that begins with `content`: it may be stored there."""
    if (found := _ID.search(content, 0, _ID_WITHIN)) is not None:
        fleet.stored(found[1].decode(), replica)


def session_of(router: RouterService, scope: Scope) -> str:
    """Return the session that a client names; empty for none."""
    name = router.session_header
    return Headers(scope=scope).get(name, "")[:_MAX_SESSION] if name else ""


def path_of(scope: Scope) -> str:
    """Return a path without the prefix of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def target_of(scope: Scope) -> bytes:
    """Return the target of a request at a replica: path and query."""
    target = quote(path_of(scope), safe=_PATH_SAFE).encode()
    query = scope["query_string"].replace(b"#", b"%23")  # of a WebSocket, it has the fragment that a client sent
    return target + b"?" + query if query else target


def headers_for(router: RouterService, rank: RoutedRank, scope: Scope) -> list[Header]:
    """Return the headers with which a request, or the handshake of a WebSocket, goes to a rank of a replica."""
    traced = {name.encode(): value.encode() for name, value in trace.headers().items()}
    headers = [header for header in _end_to_end(scope["headers"]) if _is_sane(header) and header[0] not in traced]
    headers += [(b"x-request-id", scope["state"]["request_id"].encode()), *traced.items()]
    if rank.wanted is not None and router.internal_secret:
        headers += [(DP_RANK_HEADER, b"%d" % rank.wanted), (INTERNAL_HEADER, router.internal_secret.encode())]
    return headers


def _is_elsewhere(response: Response) -> bool:
    """Return whether a replica lacks a stored response, which another may have."""
    return response.status_code in (400, 404) and any(code in response.body for code in _ELSEWHERE)


def _is_sane(header: Header) -> bool:
    """Return whether every parser would read one header here: the parser that read it is more lenient than others."""
    name, value = header
    return bool(_NAME.fullmatch(name) and _VALUE.fullmatch(value))


def _end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Return the headers to pass on: not those of one connection, nor those that every server sets for itself."""
    headers = list(headers)
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    unwanted = _HOP_BY_HOP | _MADE_ANEW | named
    return [header for header in headers if header[0] not in unwanted]


def _is_stream(headers: Iterable[Header]) -> bool:
    return any(name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers)


class _WholeAnswer(Response):
    """A replica's answer that was read to its end."""

    def __init__(self, status: int, headers: list[Header], content: bytes) -> None:
        super().__init__(content, status)
        self.raw_headers = [*headers, (b"content-length", b"%d" % len(content))]


class _Relay(Response):
    """A stream of events that has begun with `first`, passed on as it comes. `ends` is called once, with the outcome.

    Only the end of each chunk is looked at: the part of a line that a lost replica leaves is dropped, and an error
    event follows.
    """

    def __init__(
        self,
        connection: ReplicaConnection,
        first: bytes,
        headers: list[Header],
        ends: Callable[[str], None],
        framing: Framing,
        render_error: Callable[[Exception, Scope], bytes],
    ) -> None:
        super().__init__(None, connection.status)
        self.raw_headers = headers
        self._connection = connection
        self._first = first
        self._ends = ends
        self._framing = framing
        self._render_error = render_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "cancelled"
        gone = asyncio.create_task(disconnect(receive))
        gone.add_done_callback(lambda task: None if task.cancelled() else self._connection.abort("the client has gone"))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            outcome = await self._pass_on(scope, send, gone)
        finally:
            gone.cancel()
            self._ends(outcome)

    async def _pass_on(self, scope: Scope, send: Send, gone: asyncio.Task[None]) -> str:
        """Send the body, and return the outcome."""
        chunk = self._first
        rest = b""
        """A line whose end has not come."""
        try:
            while chunk:
                if chunk[-1] == 10:  # the end of a line, as nearly always
                    await send(
                        {"type": "http.response.body", "body": rest + chunk if rest else chunk, "more_body": True}
                    )
                    rest = b""
                else:
                    end = chunk.rfind(b"\n") + 1
                    if end:
                        await send({"type": "http.response.body", "body": rest + chunk[:end], "more_body": True})
                        rest = chunk[end:]
                    else:
                        rest += chunk
                chunk = await self._connection.chunk()
        except ConnectionFailed:
            if gone.done():
                return "cancelled"
            error = self._render_error(EngineDied("The replica was lost while it answered."), scope)
            last = b"\n\n" + self._framing.event(error)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return "lost"
        await send({"type": "http.response.body", "body": rest, "more_body": False})
        return "ok"
