"""WebSockets: a connection of uvicorn (websockets) with bounds on unread messages and on time, and the requests that
arrive on it as messages, which are measured and traced like HTTP requests.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from prometheus_fastapi_instrumentator.metrics import Info
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from engine import trace
from routers.state import GONE
from server.http.connection import rendered

METHOD = "WEBSOCKET"
"""Takes the place of the HTTP method in metrics and traces."""
_POLICY_VIOLATION = 1008


class WebSocketConnection(WebSocketsSansIOProtocol):
    """Aborts the connection of a client that leaves messages unread for `send_seconds`, and does not read from it
    meanwhile; closes one on which a message takes longer than `message_seconds` to arrive (1008). `HttpConnection`
    passes it a complete head first.
    """

    def __init__(self, *args: Any, message_seconds: float, send_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._message_seconds = message_seconds
        self._send_seconds = send_seconds
        self._message_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_message()
        self._end_send()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:  # it has more headers, or longer ones, than the library takes
            self.transport.write(rendered(HTTPException(400, "This is not a valid WebSocket handshake.")))
            self.transport.close()
        elif not (self.conn.reader.buffer or self.frames) or self.transport.is_closing():
            self._end_message()
        elif self._message_timer is None:
            self._message_timer = self.loop.call_later(self._message_seconds, self._message_too_slow)

    def send_receive_event_to_app(self) -> None:
        self._end_message()
        super().send_receive_event_to_app()

    def pause_writing(self) -> None:
        """Called when more than the transport's high-water mark waits for the client."""
        super().pause_writing()
        self._end_send()
        self._send_timer = self.loop.call_later(self._send_seconds, self.transport.abort)
        self.transport.pause_reading()  # pings are answered, too

    def resume_writing(self) -> None:
        """Called when most of it has gone."""
        super().resume_writing()
        self._end_send()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        if not self.writable.is_set() and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # a refusal is whole; uvicorn would log that it is not

    def _end_message(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _end_send(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _message_too_slow(self) -> None:
        self._message_timer = None
        if self.close_sent or self.transport.is_closing():
            return
        reason = f"A message did not arrive within {self._message_seconds:g} s."
        self.conn.fail(_POLICY_VIOLATION, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()


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
