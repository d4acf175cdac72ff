"""The router's HTTP client: which connections it keeps, and what becomes of those that end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.replicas.routing.upstream import Connection, StaleConnection, Upstream, UpstreamError

SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


class Server:
    """Answers each request with the next of `answers`; with nothing once there is no other."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.connections: list[asyncio.StreamWriter] = []
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                writer.write(self.answers.pop(0) if self.answers else b"")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


@asynccontextmanager
async def before(server: Server) -> AsyncIterator[tuple[Upstream, bytes]]:
    """A client of `server`, and a request."""
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    upstream = Upstream(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    try:
        yield upstream, upstream.head("GET", b"/", (), 0)
    finally:
        upstream.cut("the test is over")
        for connection in server.connections:
            connection.transport.abort()
        listening.close()
        await asyncio.sleep(0.01)


async def answered(upstream: Upstream, head: bytes) -> bytes:
    connection = await upstream.request(head)
    try:
        body = b""
        while chunk := await connection.chunk():
            body += chunk
        return body
    finally:
        upstream.release(connection)


async def requested(server: Server, count: int) -> None:
    async with asyncio.timeout(5):
        while server.requests < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [SIZED, CHUNKED])
async def test_a_connection_serves_one_request_after_the_other(answer: bytes) -> None:
    server = Server(*[answer] * 5)
    async with before(server) as (upstream, head):
        assert [await answered(upstream, head) for _ in range(5)] == [b"{}"] * 5
        assert len(server.connections) == 1


async def test_a_connection_that_the_replica_closes_is_not_kept() -> None:
    server = Server(*[SIZED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")] * 3)
    async with before(server) as (upstream, head):
        for count in range(1, 4):
            assert await answered(upstream, head) == b"{}"
            assert len(server.connections) == count


async def test_what_nobody_has_read_does_not_get_into_the_next_answer() -> None:
    server = Server(SIZED.replace(b"{}", b"me"), SIZED.replace(b"{}", b"it"))
    async with before(server) as (upstream, head):
        connection = await upstream.request(head)  # its body is here too, when its client goes
        upstream.release(connection)
        assert await answered(upstream, head) == b"it"


async def test_a_kept_connection_that_has_ended_is_replaced() -> None:
    server = Server(SIZED)
    async with before(server) as (upstream, head):
        assert await answered(upstream, head) == b"{}"
        asking = asyncio.create_task(answered(upstream, head))
        await requested(server, 2)
        server.answers.append(SIZED)
        server.connections[0].close()
        assert await asking == b"{}"
        assert len(server.connections) == 2


async def test_a_kept_connection_that_is_cut_ends_its_request() -> None:
    """Asked again, a replica that hangs would have it for another while."""
    server = Server(SIZED)
    async with before(server) as (upstream, head):
        assert await answered(upstream, head) == b"{}"
        asking = asyncio.create_task(answered(upstream, head))
        await requested(server, 2)
        upstream.cut("it hangs")
        with pytest.raises(UpstreamError, match="it hangs") as raised:
            async with asyncio.timeout(2):
                await asking
        assert not isinstance(raised.value, StaleConnection)
        assert server.requests == 2


async def test_bytes_that_belong_to_no_request_end_the_connection() -> None:
    server = Server(SIZED + b"HTTP/1.1 200 OK\r\n", SIZED)
    async with before(server) as (upstream, head):
        first: Connection = await upstream.request(head)
        assert await first.chunk() == b"{}"
        upstream.release(first)
        assert await answered(upstream, head) == b"{}"
