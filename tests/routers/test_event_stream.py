"""EventStream alone: framing, errors, silence, and clients that leave."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from engine.errors import EngineDied, QueueFull
from routers.endpoint import OPENAI, EventStream
from server.http.errors import render_event
from tests.support.waiting import slowness

SCOPE = {"type": "http", "method": "POST", "path": "/"}


class Client:
    """The other side of an ASGI application; `gone` is when it leaves."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])


class Payloads:
    """A stream of `count` payloads with a pause before each, which notes when it is closed."""

    def __init__(
        self, count: int, pause: float = 0.0, error: Exception | None = None, payload: bytes | None = None
    ) -> None:
        self._count, self._pause, self._error = count, pause, error
        self._payload = payload
        self.closed_at = 0.0

    async def stream(self) -> AsyncGenerator[bytes]:
        try:
            for number in range(self._count):
                await asyncio.sleep(self._pause)
                yield self._payload or b'{"n":%d}' % number
            if self._error is not None:
                raise self._error
        finally:
            await asyncio.sleep(0)
            self.closed_at = time.perf_counter()


async def run(payloads: Payloads, client: Client, ping: float = 0) -> None:
    await EventStream(payloads.stream(), OPENAI, ping, render_event)(SCOPE, client.receive, client.send)


async def test_framing_and_headers() -> None:
    client = Client()
    await run(Payloads(2), client)
    assert client.body == b'data: {"n":0}\n\ndata: {"n":1}\n\ndata: [DONE]\n\n'
    assert [message["more_body"] for message in client.messages[1:]] == [True, True, False]
    start = client.messages[0]
    assert start["status"] == 200
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers


async def test_error_before_the_first_event_is_raised_with_nothing_sent() -> None:
    client, payloads = Client(), Payloads(0, error=QueueFull("full"))
    with pytest.raises(QueueFull):
        await run(payloads, client)
    assert client.messages == []
    assert payloads.closed_at


@pytest.mark.parametrize("error", [EngineDied("lost"), RuntimeError("secret detail")])
async def test_later_error_is_one_event_and_the_end(error: Exception) -> None:
    client = Client()
    await run(Payloads(1, error=error), client)
    first, last, rest = client.body.split(b"\n\n")
    assert (first, rest) == (b'data: {"n":0}', b"")
    assert set(json.loads(last.removeprefix(b"data: "))["error"]) == {"message", "type", "param", "code"}
    assert b"secret" not in last
    assert client.messages[-1]["more_body"] is False


@pytest.mark.parametrize("events_before", [0, 3])
async def test_client_gone_closes_the_payloads(events_before: int) -> None:
    client, payloads = Client(), Payloads(1000, pause=0.01 if events_before else 60)
    task = asyncio.create_task(run(payloads, client))
    await asyncio.sleep(0.1)
    left = time.perf_counter()
    client.gone.set()
    with contextlib.nullcontext() if events_before else pytest.raises(ClientDisconnect):
        await task
    assert 0 < payloads.closed_at - left < 5
    assert bool(client.messages) == bool(events_before)
    assert b"[DONE]" not in client.body


async def test_client_that_does_not_read_and_goes() -> None:
    client, payloads = Client(), Payloads(1000)

    async def blocked(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    task = asyncio.create_task(EventStream(payloads.stream(), OPENAI, 0, render_event)(SCOPE, client.receive, blocked))
    await asyncio.sleep(0.05)
    assert not payloads.closed_at
    client.gone.set()
    await task
    assert payloads.closed_at


async def test_keep_alive_comments_in_silence_only() -> None:
    client = Client()
    await run(Payloads(2, pause=1.0), client, ping=0.1)
    quiet = client.body
    assert quiet.startswith(b'data: {"n":0}\n\n: keep-alive\n\n'), "none before the headers, one in the pause"
    assert quiet.endswith(b'data: {"n":1}\n\ndata: [DONE]\n\n')
    client = Client()
    seconds = slowness()
    await run(Payloads(int(60 * seconds), pause=0.02), client, ping=seconds)
    assert b"keep-alive" not in client.body
