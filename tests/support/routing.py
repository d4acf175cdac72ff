"""Shared by tests of routing: a publisher under the test's control, an observer that remembers, and a router."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import zmq
import zmq.asyncio

from engine.replicas.routing.events import SEQUENCE
from routers.state import ReplicaState
from tests.support.disaggregated import replica


class Sender:
    """Publishes like a replica. Without `replays` nobody can ask again; `kept` is what is sent then."""

    def __init__(
        self, replays: bool = True, four_frames: bool = False, port: int = 0, replay_port: int = 0, rank: int = 0
    ) -> None:
        self._context = zmq.asyncio.Context.instance()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = _bound(self._socket, port)
        self.number, self.rank = 0, rank
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.replay_port = _bound(self._router, replay_port)
        self._four_frames = four_frames
        self._task = asyncio.create_task(self._answer()) if replays else None

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    async def subscribed(self) -> None:
        """Return when somebody has subscribed."""
        async with asyncio.timeout(20):
            await self._socket.recv()

    async def send(self, *events: Any, lost: bool = False) -> None:
        """Publish a message, or with `lost` have it lost on the way."""
        payload = msgspec.msgpack.encode([0.0, list(events), self.rank])
        self.kept.append((self.number, payload))
        if not lost:
            await self._socket.send_multipart([b"", SEQUENCE.pack(self.number), payload])
        self.number += 1

    async def send_raw(self, *frames: bytes) -> None:
        await self._socket.send_multipart(list(frames))

    async def _answer(self) -> None:
        more = [b""] if self._four_frames else []
        while True:
            identity, _, start = await self._router.recv_multipart()
            (first,) = SEQUENCE.unpack(start)
            self.asked.append(first)
            for number, payload in self.kept:
                if number >= first:
                    await self._router.send_multipart([identity, b"", *more, SEQUENCE.pack(number), payload])
            await self._router.send_multipart([identity, b"", *more, SEQUENCE.pack(-1), b""])

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._socket.close()
        self._router.close()


async def two_senders() -> list[Sender]:
    """Of a replica's two data-parallel ranks, which have one port after the other."""
    while True:
        first = Sender(replays=False)
        try:
            return [first, Sender(replays=False, port=first.port + 1, rank=1)]
        except zmq.ZMQError:  # somebody else has that port
            await first.close()


def _bound(socket: zmq.asyncio.Socket, port: int) -> int:
    deadline = time.monotonic() + 20
    while port:
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return port
        except zmq.ZMQError:  # a socket that was closed there goes in ZMQ's own time
            if time.monotonic() > deadline:
                socket.close()
                raise
            time.sleep(0.01)
    return int(socket.bind_to_random_port("tcp://127.0.0.1"))


def stored(
    hashes: Sequence[int], parent: int | None = None, tokens: Sequence[int] = (), size: int = 2
) -> dict[str, Any]:
    """A stored event as our publisher sends it; without `tokens` they are those of `tokens_of`."""
    ids = list(tokens) or [token for block_hash in hashes for token in tokens_of(block_hash, size)]
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": size,
    }


def tokens_of(block_hash: int, size: int = 2) -> list[int]:
    return [block_hash * 10 + place for place in range(size)]


class Seen:
    """A `RoutingObserver` that remembers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.overlaps: list[tuple[int, int, int]] = []

    def answered(self, replica: int, outcome: str) -> None:
        self.outcomes[replica, outcome] += 1

    def chosen(self, replica: int, prompt: int, overlap: int, seconds: float) -> None:
        self.overlaps.append((replica, prompt, overlap))

    def tokenised(self, seconds: float) -> None:
        self.counts["tokenised"] += 1

    def retried(self) -> None:
        self.counts["retried"] += 1

    def affine(self) -> None:
        self.counts["affine"] += 1


@asynccontextmanager
async def router(urls: Sequence[str], **settings: Any) -> AsyncIterator[tuple[str, ReplicaState]]:
    """URL and inner life of a router before the replicas at `urls`."""
    async with replica("router", route_urls=tuple(urls), **{"route_events_port": 0, **settings}) as found:
        yield found


@asynccontextmanager
async def before(*urls: str, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, ReplicaState]]:
    """A client of a router before the replicas at `urls`, and the router."""
    async with router(urls, **settings) as (url, life), httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client, life


class Bare:
    """A replica that is ready, answers each request with the bytes `answer`, and then hangs up if `hang_up` says so."""

    def __init__(self, answer: bytes, hang_up: bool = True, hangs: bool = False) -> None:
        """`hangs`: from the first request on, probes are not answered either."""
        self.requests: list[bytes] = []
        self.ended = asyncio.Event()
        self._answer, self._hang_up, self._hangs = answer, hang_up, hangs
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Bare":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def write(self, data: bytes) -> None:
        """More of its answers, to all that are connected."""
        for writer in self._writers:
            writer.write(data)

    async def __aexit__(self, *_: object) -> None:
        self.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /health/ready"):
                if not (self._hangs and self.requests):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                ),
                0,
            )
            self.requests.append(head + await reader.readexactly(length))
            writer.write(self._answer)
            if not self._hang_up:
                await reader.read()
                self.ended.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


def chunked(*parts: bytes) -> bytes:
    """The beginning of a stream of events."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
