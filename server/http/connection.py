"""An HTTP/1.1 connection of uvicorn (httptools) that limits the head of a request and answers with our errors."""

import asyncio
import uuid
from typing import Any, cast

from fastapi import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.http.errors import render

MAX_HEAD_BYTES = 64 << 10


class HttpConnection(HttpToolsProtocol):
    """Answers 431 to a head (request line and headers) that is too large, 408 to one that does not end within
    `head_seconds`, 400 to what is not HTTP, and then closes.

    It also closes a connection that is idle for the keep-alive time, even before the first request, and aborts one
    whose client leaves an answer unread for `send_seconds`: what waits for it takes memory.
    """

    def __init__(self, *args: Any, head_seconds: float, send_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_seconds = head_seconds
        self._send_seconds = send_seconds
        self._send_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._close_when_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_send()
        self._end_head()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called when more than uvicorn's high-water mark waits for the client."""
        self._end_send()
        self._send_timer = self.loop.call_later(self._send_seconds, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Called when most of it has gone."""
        self._end_send()
        super().resume_writing()

    def _end_send(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self._head_seconds, self._head_too_slow)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HTTPException(431, f"The request line and the headers exceed {MAX_HEAD_BYTES} bytes."))
        elif self._idle:
            self._close_when_idle()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser cannot read; uvicorn calls this."""
        self._refuse(HTTPException(400, "This is not a valid HTTP request."))

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_when_idle(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        self._refuse(HTTPException(408, f"The headers did not arrive within {self._head_seconds:g} s."))

    def _refuse(self, error: HTTPException) -> None:
        """Answer and close; only close if an earlier request's answer is being sent."""
        self._end_head()
        if self._idle and not self.transport.is_closing():
            answer = render(error)
            headers = {
                **answer.headers,
                "content-type": "application/json",
                "content-length": str(len(answer.body)),
                "x-request-id": uuid.uuid4().hex,
                "connection": "close",
            }
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[answer.status] + head.encode() + b"\r\n" + answer.body)
        self.transport.close()
