"""An HTTP/1.1 connection of uvicorn (httptools) that limits heads, answers with our errors, and sends every pending
answer before it closes.
"""

import asyncio
import socket
import uuid
from collections.abc import Container
from typing import Any, cast

import httptools
from fastapi import HTTPException
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.http.errors import render

MAX_HEAD_BYTES = 64 << 10
_PIECE = 4 << 10
"""Bytes that are parsed at once. While a head is incomplete, the piece in which it begins is not counted."""
_LINGER_SECONDS = 5.0
"""Seconds that a client may take to read a refusal and to close."""
_FIRST_PROBE, _LONGEST_PROBE = 0.01, 1.0
"""Seconds from one probe of a half-closed connection to the next: each time twice as long."""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim response, of which clients ignore any number, whether or not they expect one (RFC 9110, 15.2)."""
_MALFORMED = "This is not a valid HTTP request."


class HttpConnection(HttpToolsProtocol):
    """Answers 431 to a head (request line and headers) that is too large, 408 to one that does not end within
    `head_seconds`, 505 to another version of HTTP, 400 to what is not HTTP, and then closes.

    Requests that came before are answered first. The close waits for the client, since bytes that are unread at the
    close would reset the connection, and the answer with it (RFC 9112, 9.6).

    It also closes a connection that is idle for the keep-alive time, even before the first request, and aborts one
    whose client leaves an answer unread for `send_seconds`, because unsent bytes take memory.

    After a WebSocket handshake for one of `websocket_paths`, a `WebSocketConnection` continues. Other protocol upgrades
    are declined.
    """

    def __init__(
        self,
        *args: Any,
        head_seconds: float,
        send_seconds: float,
        websocket_paths: Container[bytes] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._websocket_paths = websocket_paths
        self._handing_over = False
        """Whether the head that was parsed last opens a WebSocket; nothing is parsed any more."""
        self._head_seconds = head_seconds
        self._send_seconds = send_seconds
        self._send_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self.parser.set_dangerous_leniencies(lenient_version=True)  # other versions get 505
        self._in_body = False
        """Whether the body of the newest request is incomplete."""
        self._unparsed = b""
        """Bytes behind a request that waits until an earlier one is answered."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was answered last; `cycle` is the newest."""
        self._refusal: bytes | None = None
        """The refusal that ends the connection, empty once it is sent; nothing is parsed after it."""
        self._half_closed = False
        """Whether the client has ended its side of the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._close_when_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_send()
        self._end_head()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._running is not None:
            _disconnect(self._running)
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
        self._time_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the request, or queue it. Raises HTTPException for a request to refuse."""
        self._end_head()
        if self._is_upgrade and not self._opens_websocket():
            return
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise HTTPException(505, f"The server speaks HTTP/1.1, not HTTP/{version}.")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise HTTPException(400, f"A request must have one Host header; this one has {hosts}.")
        if self._head_size() > MAX_HEAD_BYTES:
            raise _head_too_large()
        if self._is_upgrade:
            self._handing_over = True
            return
        super().on_headers_complete()
        self._in_body = True

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            self._in_body = False
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unparsed += data
        self._parse()
        if self._idle and self._head_timer is None and self._refusal is None and not self._handing_over:
            self._close_when_idle()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio documents it
        """Keep a half-closed connection open for pending answers.

        A client that has left looks the same at first. But it resets the connection as soon as anything is sent to it:
        tokens of a stream, or interim responses before them (`_probe`). Where neither can be sent, the client counts as
        gone.
        """
        self._half_closed = True
        self._settle()
        if self._running is not None and not _can_be_probed(self._running):
            self.transport.close()
        if self.transport.is_closing():
            return False
        self._probe(_FIRST_PROBE)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._parse()
            if not self._handing_over:
                self._settle()

    def shutdown(self) -> None:
        if self._idle:
            self.transport.close()
        else:
            super().shutdown()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_upgrade(self) -> bool:
        """Whether the parser stops after this head, without the body, for another protocol."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _opens_websocket(self) -> bool:
        """Return whether to accept the upgrade. It is declined while earlier answers are pending; no client asks for
        that."""
        return (
            self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and self._get_upgrade() == b"websocket"
            and httptools.parse_url(self.url).path in self._websocket_paths
            and self._idle
            and not self._half_closed
        )

    def _should_upgrade(self) -> bool:
        """Return False: this class handles upgrades itself, before uvicorn sees the head."""
        return False

    @property
    def _idle(self) -> bool:
        """Whether no request waits for its answer."""
        running = self._running
        return not self.pipeline and (running is None or running.response_complete or running.disconnected)

    def _parse(self) -> None:
        """Parse what has come, up to a request that has to wait for the answer to an earlier one."""
        rest = memoryview(self._unparsed)
        while rest and not self.pipeline and self._refusal is None and not self.transport.is_closing():
            piece = rest[:_PIECE]
            rest = rest[_PIECE:]
            self._unset_keepalive_if_required()
            self._head_bytes += len(piece)  # where a head begins in it, the callback starts over
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                if self._handing_over:
                    self._hand_over(bytes(piece[offer.args[0] :]) + bytes(rest))
                    return
                rest = memoryview(self._head_without_upgrade() + bytes(piece[offer.args[0] :]) + bytes(rest))
            except httptools.HttpParserError as error:
                cause = error.__context__
                self._refuse(cause if isinstance(cause, HTTPException) else HTTPException(400, _MALFORMED))
            if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
        self._unparsed = bytes(rest) if self._refusal is None else b""
        if self._unparsed:
            self.flow.pause_reading()

    def _head_size(self) -> int:
        """Return the bytes of the head that was parsed last, without optional white space."""
        line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n")
        return line + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers) + len("\r\n")

    def _head_without_upgrade(self) -> bytes:
        """Return the head that was parsed last, without its headers for an upgrade (Java's client sends some)."""
        return self._head([header for header in self.headers if header[0] != b"upgrade"])

    def _head(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in headers]
        return b"\r\n".join([*lines, b"", b""])

    def _hand_over(self, rest: bytes) -> None:
        """Continue as a WebSocket, with the head that was parsed last and the bytes behind it."""
        assert self.ws_protocol_class is not None, "WebSockets have paths"
        self._unparsed = b""
        self._end_send()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.connections.discard(self)
        protocol = self.ws_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.app_state, _loop=self.loop
        )  # type: ignore[call-arg]
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.data_received(self._head(self.headers))
        if rest and not self.transport.is_closing():
            protocol.data_received(rest)

    def _close_when_idle(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _time_head(self) -> None:
        self._head_timer = self.loop.call_later(self._head_seconds, self._head_too_slow)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        if self.pipeline:  # its rest is not read yet
            self._time_head()
        else:
            self._refuse(HTTPException(408, f"The headers did not arrive within {self._head_seconds:g} s."))

    def _refuse(self, error: HTTPException) -> None:
        """Answer `error` after the pending answers, and close; later bytes are discarded."""
        self._end_head()
        has_answer = self._in_body and self.cycle.response_complete
        self._refusal = b"" if has_answer else rendered(error)
        self._drop_unfinished()
        self._settle()

    def _drop_unfinished(self) -> None:
        """Drop the request whose body will never be complete."""
        if not self._in_body:
            return
        self._in_body = False
        if self.pipeline:
            self.pipeline.popleft()
        elif not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.close()
            _disconnect(self.cycle)

    def _settle(self) -> None:
        """Once every answer has been sent: send the refusal, and close a refused or half-closed connection."""
        if self._half_closed and not self._unparsed:
            self._end_head()
            self._drop_unfinished()
        if not self._idle or self.transport.is_closing():
            return
        if self._refusal:
            self.transport.write(self._refusal)
            self._refusal = b""
        if self._half_closed:
            self.transport.close()
        elif self._refusal is not None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
            self.flow.resume_reading()
            self.transport.write_eof()

    def _probe(self, pause: float) -> None:
        """Close a half-closed connection once its client has gone."""
        if self.transport.is_closing() or self._running is None:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            _disconnect(self._running)
            self.transport.abort()
            return
        if not self._running.response_started:
            self.transport.write(_INTERIM)
        self.loop.call_later(pause, self._probe, min(2 * pause, _LONGEST_PROBE))


def _head_too_large() -> HTTPException:
    return HTTPException(431, f"The request line and the headers exceed {MAX_HEAD_BYTES} bytes.")


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Report to the application that the client has gone, and drop its remaining answers."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _can_be_probed(cycle: RequestResponseCycle) -> bool:
    """Whether something can be sent to the client at any time: not in HTTP/1.0, nor during the lease of an answer."""
    return cycle.scope["http_version"] != "1.0" and not (cycle.response_started and "lease" in cycle.scope["state"])


def rendered(error: HTTPException) -> bytes:
    """Return the answer to a request that never reached the application."""
    answer = render(error)
    headers = {
        **answer.headers,
        "content-type": "application/json",
        "content-length": str(len(answer.body)),
        "x-request-id": uuid.uuid4().hex,
        "connection": "close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[answer.status] + head.encode() + b"\r\n" + answer.body
