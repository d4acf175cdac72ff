"""The HTTP client: which connections it keeps, and connections that end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from engine.replicas.client import ConnectionFailed, ReplicaClient, ReplicaConnection, StaleConnection
from tests.support.waiting import slowness

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
async def before(server: Server) -> AsyncIterator[tuple[ReplicaClient, bytes]]:
    """A client of `server`, and a request."""
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    client = ReplicaClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    try:
        yield client, client.head("GET", b"/", (), 0)
    finally:
        client.cut("the test is over")
        for connection in server.connections:
            connection.transport.abort()
        listening.close()
        await asyncio.sleep(0.01)


async def answered(client: ReplicaClient, head: bytes) -> bytes:
    connection = await client.request(head)
    try:
        body = b""
        while chunk := await connection.chunk():
            body += chunk
        return body
    finally:
        client.release(connection)


async def requested(server: Server, count: int) -> None:
    async with asyncio.timeout(20):
        while server.requests < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [SIZED, CHUNKED])
async def test_a_connection_serves_one_request_after_the_other(answer: bytes) -> None:
    server = Server(*[answer] * 5)
    async with before(server) as (client, head):
        assert [await answered(client, head) for _ in range(5)] == [b"{}"] * 5
        assert len(server.connections) == 1


async def test_a_connection_that_the_replica_closes_is_not_kept() -> None:
    server = Server(*[SIZED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")] * 3)
    async with before(server) as (client, head):
        for count in range(1, 4):
            assert await answered(client, head) == b"{}"
            assert len(server.connections) == count


async def test_unread_bytes_of_an_answer_do_not_reach_the_next() -> None:
    server = Server(SIZED.replace(b"{}", b"me"), SIZED.replace(b"{}", b"it"))
    async with before(server) as (client, head):
        connection = await client.request(head)  # its body is here too, when its client goes
        client.release(connection)
        assert await answered(client, head) == b"it"


async def test_a_kept_connection_that_has_ended_is_replaced() -> None:
    server = Server(SIZED)
    async with before(server) as (client, head):
        assert await answered(client, head) == b"{}"
        asking = asyncio.create_task(answered(client, head))
        await requested(server, 2)
        server.answers.append(SIZED)
        server.connections[0].close()
        assert await asking == b"{}"
        assert len(server.connections) == 2


async def test_a_kept_connection_that_is_cut_ends_its_request() -> None:
    """Asked again, a replica that hangs would have it for another while."""
    server = Server(SIZED)
    async with before(server) as (client, head):
        assert await answered(client, head) == b"{}"
        asking = asyncio.create_task(answered(client, head))
        await requested(server, 2)
        client.cut("it hangs")
        with pytest.raises(ConnectionFailed, match="it hangs") as raised:
            async with asyncio.timeout(20):
                await asking
        assert not isinstance(raised.value, StaleConnection)
        assert server.requests == 2


async def test_bytes_that_belong_to_no_request_end_the_connection() -> None:
    server = Server(SIZED + b"HTTP/1.1 200 OK\r\n", SIZED)
    async with before(server) as (client, head):
        first: ReplicaConnection = await client.request(head)
        assert await first.chunk() == b"{}"
        client.release(first)
        assert await answered(client, head) == b"{}"


class Sink(asyncio.Transport):
    """A transport that takes everything and ends when it is aborted."""

    def write(self, data: object) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False


def asked() -> ReplicaConnection:
    connection = ReplicaConnection()
    connection.connection_made(Sink())
    connection.send(b"GET / HTTP/1.1\r\n\r\n", ())
    return connection


async def test_a_head_may_come_together_with_much_of_a_body() -> None:
    connection, body = asked(), bytes(200_000)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await connection.head()
    assert connection.status == 200
    assert await connection.body(1 << 20) == body


async def test_a_head_without_an_end_is_given_up() -> None:
    connection = asked()
    connection.data_received(b"HTTP/1.1 200 OK\r\n")
    for _ in range(100):
        connection.data_received(b"x-long: " + b"x" * 2000 + b"\r\n")
    with pytest.raises(ConnectionFailed, match="head of the answer is too long"):
        await connection.head()


async def test_websockets_are_requests_and_end_with_the_others() -> None:
    """They are not pinged: the answer of a reader that waits for a slow client would not be read."""

    async def stay(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async with serve(stay, "127.0.0.1", 0) as listening:
        client = ReplicaClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        first, second = [await client.websocket(b"/", []) for _ in range(2)]
        assert first.ping_interval is None
        assert client.requests == 2
        await first.close()
        await open_websockets(client, 1)
        client.cut("the replica is silent")
        with pytest.raises(ConnectionClosed):
            await second.recv()
        await open_websockets(client, 0)


async def open_websockets(client: ReplicaClient, count: int) -> None:
    async with asyncio.timeout(20 * slowness()):
        while client.requests != count:  # noqa: ASYNC110
            await asyncio.sleep(0)
