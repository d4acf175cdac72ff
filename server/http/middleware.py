"""Middleware that every request passes, outermost first: id, clock and last-resort 500; the origin of WebSockets; the
API key; metrics; the gate; HEAD.

Pure ASGI: no request is buffered.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from prometheus_fastapi_instrumentator.metrics import Info, default
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineNotReady
from engine.kit import logs
from engine.kit.logs import printable
from engine.kit.work import begin_request
from routers.state import DP_RANK_HEADER, INTERNAL_HEADER, ReplicaState
from server.http.errors import render
from server.http.routes import ADMIN, INTERNAL, is_anthropic, opens_page, route_path

LIVENESS = "/health/live"
PROBES = frozenset({LIVENESS, "/health", "/health/ready", "/metrics", "/prometheus/metrics"})
"""Routes that machines and the page at / poll."""
OPEN_WHILE_NOT_READY = PROBES | ADMIN | {"/server_info", "/version", "/openapi.json"}
"""Routes that need no service, or report its absence themselves. So do the pages (`routers/page.py`)."""

STARTS_PER_TURN = 4
"""Requests that begin in one iteration of the event loop, each about a millisecond of work."""

_RANK = re.compile(r"[0-9]{1,5}", re.ASCII)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"})
_SECONDS_BY_ROUTE = (0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 7.5),
    *(10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600),
)
"""Upper bounds in the histograms of requests: of each route, and of all together."""
_REQUESTS = ("http", "websocket")
"""Types of scopes that are requests; of a WebSocket, the handshake is one."""
_SANE_ID = re.compile(r"[!-~]{1,128}")

access = logging.getLogger("access")


class RequestMiddleware:
    """Gives each request its id (the client's own, if sane), times it, and answers 500 where nothing else did."""

    def __init__(self, app: ASGIApp, access_log: bool, logs_probes: bool = True) -> None:
        self._app = app
        self._access_log = access_log
        self._quiet = frozenset() if logs_probes else PROBES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in _REQUESTS:
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        token = logs.request_id.set(request_id)
        begin_request()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
                status = message.get("status", HTTPStatus.SWITCHING_PROTOCOLS)
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic(scope):
                    headers["request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.perf_counter() - started) * 1e3))
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            if status:  # too late for an answer: cut the connection, so that the client does not take it for complete
                raise
            await render(error, scope).response()(scope, receive, send_with_headers)
        finally:
            if self._access_log and (status != HTTPStatus.OK or route_path(scope) not in self._quiet):
                _log_access(scope, status, time.perf_counter() - started)
            logs.request_id.reset(token)


class ApiKeyMiddleware:
    """Admits requests with one of the keys, as a bearer or in `x-api-key`. Liveness and pages are open to all, with
    `open_probes` all probes and metrics are, and without keys everything is.

    Internal routes take only the internal secret, and those for operators only the admin key: they are closed without a
    configured secret or key. With the secret, a router may name the data-parallel rank of a request; nobody else can.
    Keys are compared as digests, in constant time, with every configured key.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], internal_secret: str | None, admin_key: str | None, open_probes: bool
    ) -> None:
        self._app = app
        self._open = PROBES if open_probes else {LIVENESS}
        self._keys = [_digest(key.encode()) for key in keys]
        self._secrets = [_digest(internal_secret.encode())] if internal_secret else []
        self._admins = [_digest(admin_key.encode())] if admin_key else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in _REQUESTS:
            scope.setdefault("state", {})["dp_rank"] = self._dp_rank(Headers(scope=scope))
        if scope["type"] in _REQUESTS and not self._admit(scope):
            error = HTTPException(
                401,
                "A valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY.",
                {"WWW-Authenticate": "Bearer"},
            )
            await render(error, scope).response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _dp_rank(self, headers: Headers) -> int | None:
        """Return the rank that a router has named, if the request has the internal secret."""
        rank = headers.get(DP_RANK_HEADER.decode(), "")
        if not _RANK.fullmatch(rank):
            return None
        given = _digest(headers.get(INTERNAL_HEADER.decode(), "").encode("latin-1"))
        return int(rank) if self._secrets and hmac.compare_digest(given, self._secrets[0]) else None

    def _admit(self, scope: Scope) -> bool:
        """Return whether a request is admitted, and note its key, which owns whatever the request stores."""
        path = route_path(scope)
        if path in INTERNAL:
            return _bearer(self._secrets, scope) is not None
        if path in ADMIN and self._admins:
            return _bearer(self._admins, scope) is not None or bool(_match(self._admins, _header(scope, b"x-api-key")))
        if path in self._open or opens_page(path) or not self._keys:
            return True
        used = _bearer(self._keys, scope) or _match(self._keys, _header(scope, b"x-api-key"))
        scope["state"]["owner"] = hashlib.sha256(b"owner:" + used).hexdigest() if used is not None else ""
        return used is not None


class OriginMiddleware:
    """Refuses WebSockets of web pages with an origin outside `origins`, because browsers open them without a preflight
    request. `*` allows all.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and not self._allows(Headers(scope=scope)):
            error = HTTPException(403, "Pages of this origin may not open WebSockets (CORS_ORIGINS).")
            await render(error, scope).response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        own = headers.get("host", "").lower()
        return "*" in self._origins or all(
            origin in self._origins or origin.lower().partition("://")[2] == own for origin in headers.getlist("origin")
        )


def http_metrics(registry: CollectorRegistry) -> Callable[[Info], None]:
    """Return the function that measures requests."""
    measure = default(registry=registry, latency_highr_buckets=_SECONDS, latency_lowr_buckets=_SECONDS_BY_ROUTE)
    assert measure is not None, "the registry is the application's own"
    return measure


def instrument(app: FastAPI, measure: Callable[[Info], None]) -> None:
    """Measure every request by prometheus-fastapi-instrumentator, with labels that clients cannot choose: its route's
    template (`none` without a route), method (`other` for rare ones) and class of status.
    """

    def measure_bounded(info: Info) -> None:
        if info.method not in _METHODS:
            info.method = "other"
        measure(info)

    Instrumentator().add(measure_bounded).instrument(app)


class GateMiddleware:
    """Refuses requests with 503 while the replica starts or drains, admits the others a few at a time, and counts
    running ones, for which a shutdown waits. On a WebSocket each request counts, not the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turnstile = Turnstile(STARTS_PER_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in _REQUESTS or (path := route_path(scope)) in OPEN_WHILE_NOT_READY or opens_page(path):
            await self._app(scope, receive, send)
            return
        replica: ReplicaState = scope["state"]["replica"]
        try:
            scope["state"]["service"] = replica.enter()
        except EngineNotReady as error:
            await render(error, scope).response()(scope, receive, send)
            return
        running = True
        try:
            await self._turnstile.enter()
            if scope["type"] == "websocket":
                running = False
                replica.leave()
            await self._app(scope, receive, send)
        finally:
            if running:
                replica.leave()


class HeadMiddleware:
    """Answers HEAD as GET; the connection leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


class Turnstile:
    """Admits a few callers in each iteration of the loop, in order, so that a burst of requests does not delay running
    streams.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return in this iteration, or in a later one."""
        loop = asyncio.get_running_loop()
        if self._left == self._per_turn:
            loop.call_soon(self._turn, loop)
        if self._left:
            self._left -= 1
        else:
            self._waiting.append(future := loop.create_future())
            await future

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._per_turn
        while self._waiting and self._left:
            future = self._waiting.popleft()
            if not future.done():  # cancelled while it waited
                future.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            loop.call_soon(self._turn, loop)


def _bearer(digests: Sequence[bytes], scope: Scope) -> bytes | None:
    """Return the digest of the request's bearer key, if it is one of `keys`."""
    scheme, _, key = _header(scope, b"authorization").partition(b" ")
    return _match(digests, key.strip()) if scheme.lower() == b"bearer" else None


def _match(digests: Sequence[bytes], key: bytes) -> bytes | None:
    given = _digest(key)
    matches = [digest for digest in digests if hmac.compare_digest(given, digest)]
    return matches[0] if matches else None


def _header(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header; empty if it is missing or repeated."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    client = scope["client"][0] if scope.get("client") else "-"
    path = printable(scope["path"], 200)
    method = scope.get("method", "GET")
    fields = {"client": client, "method": method, "path": path, "status": status, "seconds": round(seconds, 6)}
    access.info('%s "%s %s" %d %.3f s', client, method, path, status, seconds, extra={"fields": fields})
