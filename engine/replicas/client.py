"""The HTTP/1.1 client of one replica: for probes, prefill, encode and forwarded requests.

Connections are kept, and bodies are passed on as they come. The client is our own because of the router: a general one
costs a multiple for each token of each stream (figures in docs/log.md). Callers limit the time that a request may take;
the client itself limits only connecting.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import httptools

from engine.errors import EngineUnavailable

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Header = tuple[bytes, bytes]
CONNECT_SECONDS = 1.5
IDLE_SECONDS = 30.0
"""Idle connections are not used again after this time; servers close theirs later."""
MAX_IDLE = 256
_HIGH_WATER = 1 << 18
"""Bytes of an answer that may wait for a slow reader before the replica has to wait."""
_SMALL_BODY = 1 << 16
"""Bodies below this size are sent together with their head."""
_MAX_HEAD = 1 << 17
_MAX_SHORT_ANSWER = 1 << 16
_MAX_MESSAGE = 256 << 20
_HANDSHAKE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
"""Seconds that the replica may take to confirm that a WebSocket is closed."""


class ConnectionFailed(EngineUnavailable):
    """The replica cannot be reached, or the connection was lost. The message may name an address: it is for the log."""


class StaleConnection(ConnectionFailed):
    """A kept connection had been closed before the request could reach the replica."""


class AnswerTooLong(ConnectionFailed):
    """An answer has more bytes than it may."""


class WebSocketRefused(EngineUnavailable):
    """The replica has answered the handshake of a WebSocket with a status of its own."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"The replica refuses the WebSocket with status {status}.")
        self.status = status
        self.body = body


class ReplicaConnection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.idle_since = 0.0
        """End of its last request; 0 before the first one ends."""
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._paused = False
        self._complete = True
        """Whether no answer is due."""
        self._head_bytes = 0
        self._keeps = False
        self._lost: ConnectionFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def alive(self) -> bool:
        return self._lost is None and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether the connection can serve another request: the replica keeps it, and the whole answer was read."""
        return self._complete and self._keeps and not self._chunks and self.alive

    def send(self, head: bytes, body: Sequence[bytes]) -> None:
        """Begin a request."""
        self.status = 0
        self.headers = []
        self._complete = False
        self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        if sum(map(len, body)) < _SMALL_BODY:
            self._transport.write(b"".join((head, *body)))
            return
        for part in (head, *body):
            self._transport.write(part)

    async def head(self) -> None:
        """Return once `status` and `headers` are there. Raises ConnectionFailed."""
        while not self.status:
            await self._more()

    async def chunk(self) -> bytes:
        """Return what has come of the body, empty only at its end. Raises ConnectionFailed if it breaks off."""
        while not self._chunks:
            if self._complete:
                return b""
            await self._more()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def body(self, limit: int = _MAX_SHORT_ANSWER) -> bytes:
        """Return the whole body. Raises ConnectionFailed, AnswerTooLong."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.chunk():
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise AnswerTooLong("the answer is too long")
        return b"".join(parts)

    def abort(self, reason: str = "the connection was given up") -> None:
        """End the connection at once; a task that waits for its answer gets ConnectionFailed with `reason`."""
        if self._lost is None:
            self._lost = ConnectionFailed(reason)
            self._transport.abort()
            self._wake()

    async def _more(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:  # else this reader was cancelled, and the next request waits already
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost is None:
            stale = self.idle_since and not self._head_bytes
            self._lost = (StaleConnection if stale else ConnectionFailed)("the connection was lost")
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self.abort("an answer came without a request")
            return
        counted = not self.status
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort("the answer is not HTTP")
            return
        if counted:
            self._head_bytes += len(data)
            if not self.status and self._head_bytes > _MAX_HEAD:  # a head may come together with much of a body
                self.abort("the head of the answer is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
        else:
            self.status = status
            self._wake()

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._size > _HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self.status:
            self._complete = True
            self._keeps = self._parser.should_keep_alive()  # not known before
            self._wake()


class ReplicaClient:
    """The connections to the replica at `url`, http://host:port or https://host:port."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, "checked by the settings"
        self.host = parts.hostname
        self.port = parts.port
        self.requests = 0
        """Requests that have begun and whose connections are not released, and open WebSockets."""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._authority = parts.netloc.encode()
        self._idle: list[ReplicaConnection] = []
        self._busy: set[ReplicaConnection] = set()
        self._websockets: dict[asyncio.Task[None], ClientConnection] = {}
        """Open WebSockets by the task that ends with each."""

    def head(self, method: str, target: bytes, headers: Sequence[Header], length: int = 0) -> bytes:
        """The head of a request. `headers` must have neither Host nor Content-Length."""
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: " + self._authority]
        lines += [b"%b: %b" % header for header in headers]
        if length or method == "POST":
            lines.append(b"content-length: %d" % length)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    async def request(self, head: bytes, *body: bytes) -> ReplicaConnection:
        """Return a connection that has the head of the answer; the caller releases it. Raises ConnectionFailed."""
        self.requests += 1
        connection: ReplicaConnection | None = None
        try:
            while True:
                connection = self._kept() or await self._connect()
                self._busy.add(connection)
                with suppress(StaleConnection):
                    connection.send(head, body)
                    await connection.head()
                    return connection
                self._put_back(connection)
        except BaseException:  # cancellation included
            self.requests -= 1
            if connection is not None:
                self._put_back(connection)
            raise

    async def websocket(self, target: bytes, headers: Sequence[Header]) -> "ClientConnection":
        """Open a WebSocket, which the caller closes. Raises ConnectionFailed, WebSocketRefused.

        It sends no pings: while its reader waits for a slow client, pongs would not be read.
        """
        from websockets.asyncio.client import connect  # noqa: PLC0415 - only routers need it
        from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415

        scheme = "ws" if self._tls is None else "wss"
        try:
            connection = await connect(
                f"{scheme}://{self._authority.decode()}{target.decode()}",
                additional_headers=[(name.decode(), value.decode("latin-1")) for name, value in headers],
                user_agent_header=None,
                compression=None,
                proxy=None,
                ssl=self._tls,
                open_timeout=_HANDSHAKE_SECONDS,
                close_timeout=_CLOSE_SECONDS,
                ping_interval=None,
                max_size=_MAX_MESSAGE,
            )
        except InvalidStatus as refused:
            raise WebSocketRefused(refused.response.status_code, bytes(refused.response.body or b"")) from None
        except (OSError, TimeoutError, InvalidHandshake) as error:
            raise ConnectionFailed(f"cannot open a WebSocket: {str(error) or 'timeout'}") from error
        self.requests += 1
        closed = asyncio.create_task(connection.wait_closed())
        self._websockets[closed] = connection
        closed.add_done_callback(self._websocket_closed)
        return connection

    async def get(self, target: bytes, headers: Sequence[Header]) -> tuple[int, bytes]:
        """Return status and body of a short answer. Raises ConnectionFailed, AnswerTooLong."""
        connection = await self.request(self.head("GET", target, headers))
        try:
            return connection.status, await connection.body()
        finally:
            self.release(connection)

    def release(self, connection: ReplicaConnection) -> None:
        """End a request. Its connection is kept if the answer was read to its end, else closed. Idempotent."""
        if connection in self._busy:
            self.requests -= 1
            self._put_back(connection)

    def cut(self, reason: str) -> None:
        """End every connection. Requests that wait for an answer fail with ConnectionFailed and `reason`."""
        for connection in (*self._busy, *self._idle):
            connection.abort(reason)
        self._idle.clear()
        for websocket in self._websockets.values():
            websocket.transport.abort()

    def _websocket_closed(self, closed: asyncio.Task[None]) -> None:
        del self._websockets[closed]
        self.requests -= 1

    def _put_back(self, connection: ReplicaConnection) -> None:
        self._busy.discard(connection)
        if connection.reusable and len(self._idle) < MAX_IDLE:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def _kept(self) -> ReplicaConnection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.alive and now - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> ReplicaConnection:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(
                    ReplicaConnection, self.host, self.port, ssl=self._tls
                )
                return connection
        except (OSError, TimeoutError) as error:
            raise ConnectionFailed(f"cannot connect: {str(error) or 'timeout'}") from error
