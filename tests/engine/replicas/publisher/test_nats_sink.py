"""KV-cache events to a real NATS server, which comes, goes and comes back."""

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import FakeConfig
from engine.create import create_engine
from engine.errors import EngineFailure
from engine.process.sockets import free_port
from engine.replicas.publisher.nats_sink import NatsSink
from engine.replicas.publisher.sink import Message
from tests.support.publisher import BLOCK, generate, publishing

nats = pytest.importorskip("nats", reason="nats-py is not installed (constraints-dev.txt)")
SERVER = shutil.which("nats-server", path=str(Path(sys.executable).parent))
pytestmark = pytest.mark.skipif(SERVER is None, reason="nats-server is not installed (constraints-dev.txt)")


def sink_to(port: int, subject: str = "trellis.kv_events") -> NatsSink:
    return NatsSink(f"nats://127.0.0.1:{port}", subject, capacity=10_000)


@asynccontextmanager
async def server(port: int, *options: str) -> AsyncIterator[Process]:
    """A NATS server that answers."""
    process = await asyncio.create_subprocess_exec(
        str(SERVER), "-a", "127.0.0.1", "-p", str(port), *options, stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        await until(lambda: answers(port))
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def answers(port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()
        return True
    return False


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)


async def is_true(value: Any) -> bool:
    return bool(value)


@asynccontextmanager
async def subscribed(port: int, subject: str) -> AsyncIterator[asyncio.Queue[Any]]:
    """What comes under a subject."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    client = await nats.connect(f"nats://127.0.0.1:{port}")
    try:
        await client.subscribe(subject, cb=messages.put)
        await client.flush()
        yield messages
    finally:
        await client.close()


@pytest.fixture
async def engine() -> AsyncIterator[Any]:
    fake = create_engine(FakeConfig(num_blocks=64, block_size=BLOCK, context_length=128))
    await fake.start()
    yield fake
    await fake.close()


async def test_messages_are_those_of_zmq(engine: Any) -> None:
    port = free_port()
    async with server(port), subscribed(port, "kv.replica1") as messages:
        async with publishing(engine, [sink_to(port, "kv.replica1")]) as publisher:
            await generate(engine, "a", range(10, 19), max_tokens=8)
            await until(lambda: is_true(messages.qsize() == publisher.ranks[0].messages))
        received = [messages.get_nowait() for _ in range(messages.qsize())]
        assert [message.headers for message in received] == [
            {"sequence": str(i), "rank": "0"} for i in range(len(received))
        ]
        events = [event for message in received for event in msgspec.msgpack.decode(message.data)[1]]
        assert [event["type"] for event in events] == ["AllBlocksCleared", *["BlockStored"] * (len(events) - 1)]
        assert [token for event in events[1:] for token in event["token_ids"]] == [*range(10, 19), *range(10, 17)]


async def test_a_server_that_comes_late_gets_all_and_one_that_comes_back_goes_on(engine: Any) -> None:
    port = free_port()
    sink = sink_to(port)
    async with publishing(engine, [sink]) as publisher:
        await generate(engine, "early", range(10, 19))
        assert sink.waiting == publisher.ranks[0].messages > 0
        async with server(port) as process:
            await until(lambda: is_true(not sink.waiting))
            process.kill()
        await until(lambda: is_true(not sink.connected))
        await generate(engine, "meanwhile", range(30, 39))
        assert sink.waiting > 0
        async with server(port), subscribed(port, "trellis.kv_events") as messages:
            message = await asyncio.wait_for(messages.get(), 10)
            assert msgspec.msgpack.decode(message.data)[1][0]["token_ids"] == [*range(30, 38)]
            assert (publisher.failure, sink.dropped) == (None, 0)


async def test_memory_is_bounded_and_what_is_dropped_is_counted() -> None:
    sink = NatsSink("nats://127.0.0.1:1", "kv", capacity=100)
    for number in range(1000):
        sink.send(Message(b"%d" % number, 0, number, False))
    assert (sink.waiting, sink.dropped, sink.sent) == (100, 900, 0)


async def test_a_message_too_large_for_the_server_is_dropped_alone() -> None:
    port = free_port()
    async with server(port), subscribed(port, "kv") as messages:
        sink = sink_to(port, "kv")
        running = asyncio.create_task(sink.run())
        sink.send(Message(bytes(2 << 20), 0, 0, False))
        sink.send(Message(b"small", 0, 1, False))
        assert (await asyncio.wait_for(messages.get(), 10)).data == b"small"
        assert (sink.dropped, sink.sent) == (1, 1)
        running.cancel()
        await asyncio.wait([running])


async def test_a_server_that_throws_us_out_for_good_is_a_failure(engine: Any, tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "nats.conf"
    config.write_text("authorization { users = [{user: us, password: first}] }")
    sink = NatsSink(f"nats://us:first@127.0.0.1:{port}", "kv", capacity=100)
    async with server(port, "-c", str(config)) as process, publishing(engine, [sink]) as publisher:
        await until(lambda: is_true(sink.connected))
        config.write_text("authorization { users = [{user: us, password: second}] }")
        os.kill(process.pid, signal.SIGHUP)  # have it read again
        await until(lambda: is_true(publisher.failure is not None))
        assert publisher.failure == "the NATS server has ended the connection for good"


async def test_without_nats_py_the_start_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nats.aio.client", None)
    with pytest.raises(EngineFailure, match=r"NATS_URL needs nats-py: pip install 'trellis\[nats\]'"):
        NatsSink("nats://127.0.0.1:1", "kv", capacity=1)
