"""Large images on a slow way to an encode replica."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.replicas import ask as client
from tests.support.disaggregated import replica
from tests.support.encode import encoder_of, expected, image


@asynccontextmanager
async def slow_way(to: str, seconds: float) -> AsyncIterator[str]:
    """A way to the replica `to` on which a body waits for so long before any of it goes on."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*to.removeprefix("http://").split(":"))

        async def back() -> None:
            while data := await there[0].read(1 << 16):
                writer.write(data)
            writer.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(back())
            while data := await reader.read(1 << 16):
                if data.startswith(b"POST"):
                    await asyncio.sleep(seconds)
                there[1].write(data)
                await there[1].drain()
            there[1].close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_replica_is_not_taken_for_silent_while_large_images_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(client, "_SLOWEST_UPLOAD", 4 << 20)
    large = [image(0, 18 << 20)]  # more than the sockets' buffers
    async with replica("encode") as (url, _), slow_way(url, 2.0) as slow, encoder_of([slow]) as (encoder, _, seen):
        assert await encoder.encode(large) == await expected(large)
        assert seen.outcomes == {"ok": 1} and seen.peers == {slow: True}
