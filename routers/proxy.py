"""What a router serves: everything under /v1, forwarded to a replica that it chooses, and the answer handed on as it comes.

A request goes to another replica only for as long as its client has not seen anything: until the first bytes of a stream, or all of
another answer, have come. Of a stream that breaks off later, the client gets its whole lines and an error event.
"""

import logging
import re
import time
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from engine import trace
from engine.errors import EngineDied, EngineNotReady
from engine.replicas.routing.fleet import NoReplica, Prompt
from engine.replicas.routing.load import Work
from engine.replicas.routing.replica import Replica
from engine.replicas.routing.upstream import Connection, Header, UpstreamError
from multimodal.errors import RequestError
from routers.body import read_body
from routers.disconnect import while_connected
from routers.endpoint import Endpoint
from routers.endpoints import ENDPOINTS
from routers.parsing import parsed
from routers.relay import REPLICA_HEADER, Relay, WholeAnswer, end_to_end, is_stream, whole
from routers.sse import OPENAI
from routers.state import RouterService, RouterServiceDep, state_of
from routers.tokenize import PATHS

router = APIRouter(tags=["router"])

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_PATH_SAFE = "/:@!$&'()*+,;=~-._"
_MAX_SESSION = 1 << 10
_REFUSALS = frozenset({429, 503})

log = logging.getLogger(__name__)


async def forward(request: Request, service: RouterServiceDep) -> Response:
    """Whatever a replica answers."""
    body = await read_body(request, state_of(request)["http"]) if request.method == "POST" else b""
    return await while_connected(request, _Exchange(request, service, body).answer())


# In order of precedence: metrics and traces know each by its path.
for _path in (*(endpoint.path for endpoint in ENDPOINTS), *PATHS):
    router.add_api_route(_path, forward, methods=["POST"], include_in_schema=False)
router.add_api_route("/v1/{path:path}", forward, methods=["GET", "POST"], include_in_schema=False)


class _Exchange:
    """One request, at one replica after the other until one answers."""

    def __init__(self, request: Request, router: RouterService, body: bytes) -> None:
        self._request = request
        self._router = router
        self._fleet = router.fleet
        self._body = body
        self._endpoint: Endpoint[Any] | None = next(
            (endpoint for endpoint in ENDPOINTS if request.scope["path"].endswith(endpoint.path)), None
        )
        self._tried: list[Replica] = []
        self._session = request.headers.get(router.session_header, "")[:_MAX_SESSION] if router.session_header else ""

    async def answer(self) -> Response:
        """The answer, whole or as a stream that has begun. Raises NoReplica."""
        prompt = await self._prompt()
        refusal: Response | None = None
        why: UpstreamError | None = None
        while len(self._tried) < self._fleet.attempts:
            try:
                replica, work = self._fleet.choose(prompt, self._session, self._tried)
            except NoReplica:
                break
            if self._tried:
                self._fleet.observer.retried()
            self._tried.append(replica)
            try:
                response = await self._ask(replica, work)
            except UpstreamError as error:
                log.info("replica %d did not answer: %s", replica.number, error)
                why = error
                continue
            if response.status_code not in _REFUSALS:
                return response
            refusal = response
        if refusal is not None:
            return refusal
        raise (
            EngineNotReady("No replica is ready.")
            if why is None
            else EngineDied("The replicas that were asked did not answer.")
        )

    async def _prompt(self) -> Prompt:
        """Of a request that generates; of any other, nothing is known, and nothing has to be."""
        if self._endpoint is None:
            return Prompt(count=1)
        started = time.perf_counter()
        try:
            ask = self._endpoint.convert(await parsed(self._endpoint.body, self._body))
        except RequestValidationError:  # which a replica answers
            return Prompt(count=1)
        except RequestError:
            prompt = Prompt()
        else:
            prompt = await self._router.prompts.of(ask)
        self._fleet.observer.tokenised(time.perf_counter() - started)
        return prompt

    async def _ask(self, replica: Replica, work: Work) -> Response:
        """Raises UpstreamError."""
        outcome = "cancelled"
        connection: Connection | None = None
        try:
            with trace.span(
                "route", {"trellis.replica": replica.number, "trellis.attempt": len(self._tried)}, client=True
            ):
                connection = await replica.upstream.request(self._head(replica), self._body)
                headers = [*end_to_end(connection.headers), (REPLICA_HEADER, b"%d" % replica.number)]
                if is_stream(connection.headers):
                    first = await connection.chunk()
                    replica.succeeded()
                    work.answered()
                    ends = partial(self._end, replica, work, connection)
                    outcome = ""
                    framing = self._endpoint.framing if self._endpoint is not None else OPENAI
                    return Relay(connection, first, headers, ends, framing, state_of(self._request)["render_error"])
                content = await whole(connection)
            outcome = "refused" if connection.status in _REFUSALS else "error" if connection.status >= 500 else "ok"
            if connection.status == 503:
                replica.refused()
            else:
                replica.succeeded()
            return WholeAnswer(connection.status, headers, content)
        except UpstreamError as error:
            outcome = "unreachable"
            replica.failed(str(error))
            raise
        finally:
            if outcome:
                self._end(replica, work, connection, outcome)

    def _end(self, replica: Replica, work: Work, connection: Connection | None, outcome: str) -> None:
        """Of the work at a replica, whatever became of it."""
        work.end()
        if connection is not None:
            replica.upstream.release(connection)
        if outcome == "lost":
            replica.broke_off()
        self._fleet.observer.answered(replica.number, outcome)

    def _head(self, replica: Replica) -> bytes:
        scope = self._request.scope
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        target = quote(path.removeprefix(root) if path.startswith(f"{root}/") else path, safe=_PATH_SAFE).encode()
        if query := scope["query_string"]:
            target += b"?" + query
        traced = {name.encode(): value.encode() for name, value in trace.headers().items()}
        headers = [
            header for header in end_to_end(self._request.headers.raw) if _is_sane(header) and header[0] not in traced
        ]
        headers += [(b"x-request-id", scope["state"]["request_id"].encode()), *traced.items()]
        return replica.upstream.head(self._request.method, target, headers, len(self._body))


def _is_sane(header: Header) -> bool:
    """Whether it is one header wherever it goes; the parser that it came through is more lenient than others."""
    name, value = header
    return bool(_NAME.fullmatch(name) and _VALUE.fullmatch(value))
