"""Requests to a replica over HTTP/1.1, as lean as a proxy needs them: kept connections, heads parsed, bodies handed on as they come.

A general client costs a multiple of this for each token of each stream; figures are in docs/routing.md.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

Header = tuple[bytes, bytes]
CONNECT_SECONDS = 2.0
IDLE_SECONDS = 30.0
"""A connection idle for longer is not used again; servers close theirs after more."""
MAX_IDLE = 256
_HIGH_WATER, _LOW_WATER = 1 << 18, 1 << 16
"""Bytes of an answer that may wait for a slow client before the replica has to wait, and until it goes on."""
_MAX_HEAD = 1 << 17


class UpstreamError(Exception):
    """The replica cannot be reached, or its connection was lost."""


class StaleConnection(UpstreamError):
    """A kept connection had been closed before the request could reach the replica."""


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.idle_since = 0.0
        self.used = False
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._paused = self._headed = self._keeps = self._stale = False
        self._complete = True
        """No answer is due."""
        self._parser = httptools.HttpResponseParser(self)
        self._lost: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._head_bytes = 0

    @property
    def alive(self) -> bool:
        return self._lost is None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> None:
        """Begin a request."""
        self.status, self.headers = 0, []
        self._complete = self._headed = self._keeps = False
        self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(head + body if len(body) < _LOW_WATER else head)
        if len(body) >= _LOW_WATER:
            self._transport.write(body)

    async def head(self) -> None:
        """Return once `status` and `headers` are there. Raises UpstreamError."""
        while not self._headed:
            await self._more()

    async def chunk(self) -> bytes:
        """What has come of the body, at least a byte; nothing at its end. Raises UpstreamError if it breaks off."""
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

    async def _more(self) -> None:
        if self._lost is not None:
            raise StaleConnection(self._lost) if self._stale else UpstreamError(self._lost)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end, so that nothing of it can get into another, and the replica keeps the connection."""
        return self._complete and self._keeps and not self._chunks and self.alive

    def abort(self, reason: str = "the connection was given up") -> None:
        if self._lost is None:
            self._lost = reason
            self._transport.abort()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost is None:
            self._lost = "the connection was lost"
            self._stale = self.used and not self._head_bytes
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self.abort("an answer to nothing")
            return
        if not self._headed:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD:
                self.abort("the head of the answer has no end")
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort("the answer is no HTTP")

    def eof_received(self) -> bool:
        return False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
        else:
            self.status, self._headed = status, True
            self._wake()

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if self._size > _HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete = True
            self._keeps = self._parser.should_keep_alive()  # it knows only here
            self._wake()


class Upstream:
    """The connections to one replica at `url`, http://host:port or https://host:port."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, "the settings are checked"
        self._host, self._port = parts.hostname, parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._authority = parts.netloc.encode()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    def head(self, method: str, target: bytes, headers: Sequence[Header], length: int) -> bytes:
        """The head of a request. `headers` must have neither Host nor Content-Length."""
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: " + self._authority]
        lines += [b"%b: %b" % header for header in headers]
        if length or method == "POST":
            lines.append(b"content-length: %d" % length)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    async def request(self, head: bytes, body: bytes = b"") -> Connection:
        """A connection that has the head of the answer; `release` it. Raises UpstreamError."""
        while True:
            connection = self._kept() or await self._connect()
            self._busy.add(connection)
            try:
                connection.send(head, body)
                await connection.head()
                return connection
            except StaleConnection:
                self.release(connection)
            except BaseException:  # cancellation included
                self.release(connection)
                raise

    def release(self, connection: Connection) -> None:
        """Keep the connection for another request if its answer was read to the end, else end it."""
        self._busy.discard(connection)
        if connection.reusable and len(self._idle) < MAX_IDLE:
            connection.used, connection.idle_since = True, asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def cut(self, reason: str) -> None:
        """End every connection: the replica does not answer any more. Those who wait for it get UpstreamError."""
        for connection in (*self._busy, *self._idle):
            connection.abort(reason)
        self._idle.clear()

    def _kept(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.alive and now - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
                return connection
        except (OSError, TimeoutError) as error:
            raise UpstreamError("it cannot be reached") from error
