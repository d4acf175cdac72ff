"""Requests that come as messages on a WebSocket: measured and traced as those of HTTP are."""

import time
from collections.abc import Callable

from prometheus_fastapi_instrumentator.metrics import Info
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from engine import trace
from routers.state import GONE

METHOD = "WEBSOCKET"
"""Stands for the method of HTTP in metrics and traces."""


class WebSocketRequest:
    """The `routers.state.MessageClock` of one request, `size` bytes on the connection of `scope`."""

    def __init__(
        self,
        measure: Callable[[Info], None],
        traced: Callable[[str, Headers], trace.Span] | None,
        scope: Scope,
        request_id: str,
        size: int,
    ) -> None:
        self._measure = measure
        self._scope = scope
        self._request_id = request_id
        self._size = size
        self._started = time.perf_counter()
        self._path: str = scope["route"].path
        self.status = GONE
        self.span = traced(f"{METHOD} {self._path}", Headers(scope=scope)) if traced is not None else None

    def end(self) -> None:
        """See `MessageClock`."""
        head = {"type": "http", "headers": [(b"content-length", b"%d" % self._size)]}
        seconds = time.perf_counter() - self._started
        self._measure(Info(Request(head), None, METHOD, self._path, f"{self.status // 100}xx", seconds))
        if self.span is not None:
            self.span.set(
                {
                    "http.route": self._path,
                    "http.request.method": METHOD,
                    "http.response.status_code": self.status,
                    "url.scheme": self._scope["scheme"],
                    "trellis.request_id": self._request_id,
                }
            )
            self.span.end()
