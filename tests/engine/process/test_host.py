"""The process boundary: messages across it, and requests of clients and hosts that disappear."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import Raw
from msgspec.structs import replace

from engine.config import FakeConfig
from engine.errors import EngineDied, EngineFailure, EngineNotReady, InvalidRequest
from engine.fake.engine import FakeEngine
from engine.kit import logs
from engine.media import MediaFiles, MediaInput, MediaSpan, MediaSpans
from engine.process import wire
from engine.process.client import EngineClient
from engine.process.engine_service import ENGINE
from engine.process.host import ServiceHost, _HostProcess, bind
from engine.process.sockets import context
from engine.process.wire import SILENCE_SECONDS
from engine.stats import IterationStats
from engine.types import Delta, GenerateRequest, SamplingParams

_ids = itertools.count()
FOREVER = 30_000


def request_for(max_tokens: int = 10, prompt: tuple[int, ...] = (5, 6, 7)) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(next(_ids)), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def active(fake: FakeEngine, count: int, timeout: float = 20.0) -> IterationStats:
    """Statistics with `count` requests inside the engine; fails if that does not come about in time."""
    async with asyncio.timeout(timeout):
        async for stats in fake.stats():
            if stats.num_active_requests + stats.num_queued_requests == count:
                return stats
    raise AssertionError("the statistics have ended")


@asynccontextmanager
async def host_at(address: str, fake: FakeEngine) -> AsyncIterator[ServiceHost]:
    """A host in this process, so that the engine behind it can be watched; leaving kills it as SIGKILL would."""
    host = ServiceHost(ENGINE, fake, bind(address))
    serving = asyncio.create_task(host.serve())
    try:
        yield host
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        host.close()


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine(FakeConfig(token_delay=0.001))
    await fake.start()
    yield fake
    await fake.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
async def client(address: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(address)
    yield client
    await client.close()


@pytest.mark.parametrize(
    "module", ["engine.process.host", "engine.process.client", "engine.process.child", "engine.fake.engine"]
)
def test_the_host_imports_no_heavy_library(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'torch', 'transformers', 'fastapi'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


async def test_only_the_user_may_connect(fake: FakeEngine, address: str, tmp_path: Path) -> None:
    async with host_at(address, fake):
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0


def test_a_standby_that_is_ended_by_force_leaves_the_socket_of_the_host_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket, left = tmp_path / "service.sock", []
    socket.touch()
    monkeypatch.setattr("engine.process.host.STOP_SECONDS", 0.0)
    monkeypatch.setattr("engine.process.host.leave", left.append)
    config = msgspec.Raw(msgspec.json.encode(FakeConfig()))
    options = wire.HostOptions(config, f"ipc://{socket}", logs.current(), standby="model")
    standby: Any = _HostProcess(ENGINE, options, SimpleNamespace(), b"")
    standby.exit_by_force()
    assert left == [1] and socket.exists()


async def test_tcp(fake: FakeEngine) -> None:
    socket = bind("tcp://127.0.0.1:0")
    host = ServiceHost(ENGINE, fake, socket)
    client = EngineClient(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    await client.start()
    assert (await collect(client.generate(request_for())))[-1].finish_reason == "length"
    await client.close()
    host.close()


async def test_clients_share_a_host_and_one_that_says_goodbye_leaves_nothing(fake: FakeEngine, address: str) -> None:
    async with host_at(address, fake):
        clients = [EngineClient(address) for _ in range(3)]
        await asyncio.gather(*(client.start() for client in clients))
        streams = [client.generate(request_for(FOREVER)) for client in clients for _ in range(5)]
        for stream in streams:
            await anext(stream)
        await clients[0].close()
        await active(fake, 10, timeout=SILENCE_SECONDS - 1)
        for stream in streams[:5]:
            with pytest.raises(EngineNotReady):
                await collect(stream)
        assert (await collect(clients[1].generate(request_for())))[-1].finish_reason == "length"
        for client in clients[1:]:
            await client.close()
        await active(fake, 0, timeout=SILENCE_SECONDS - 1)


async def test_a_client_that_is_killed_leaves_nothing(fake: FakeEngine, address: str) -> None:
    code = """
        import asyncio, sys
        from engine.process.client import EngineClient
        from engine.types import GenerateRequest, SamplingParams

        async def main():
            client = EngineClient(sys.argv[1])
            await client.start()
            sampling = SamplingParams(max_tokens=30000)
            requests = [GenerateRequest(request_id=str(i), prompt_token_ids=(5,), sampling=sampling) for i in range(20)]
            streams = [client.generate(request) for request in requests]
            await asyncio.gather(*(anext(stream) for stream in streams))
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    async with host_at(address, fake):
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(code), address)
        try:
            await active(fake, 20, timeout=20)
        finally:
            child.kill()
        await active(fake, 0)
        await child.wait()


@asynccontextmanager
async def stopped_reader(fake: FakeEngine, address: str) -> AsyncIterator[asyncio.StreamReader]:
    """A client in a process that is suspended while it reads a long answer, and goes on once `fake` has no requests.

    It prints how many tokens it has got or why there are no more, and then how another request ends.
    """
    code = f"""
        import asyncio, sys
        from engine.process.client import EngineClient
        from engine.errors import EngineDied
        from engine.types import GenerateRequest, SamplingParams

        def request(max_tokens):
            sampling = SamplingParams(max_tokens=max_tokens)
            return GenerateRequest(request_id=str(max_tokens), prompt_token_ids=(5,), sampling=sampling)

        async def main():
            client = EngineClient(sys.argv[1])
            await client.start()
            stream = client.generate(request({FOREVER}))
            received = len((await anext(stream)).token_ids)
            print("running", flush=True)
            try:
                async for delta in stream:
                    received += len(delta.token_ids)
                print(received)
            except EngineDied as error:
                print(error)
            while not client.healthy:
                await asyncio.sleep(0.01)
            deltas = [delta async for delta in client.generate(request(3))]
            print(deltas[-1].finish_reason)
            await client.close()

        asyncio.run(main())
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(code), address, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        assert await child.stdout.readline() == b"running\n"
        os.kill(child.pid, signal.SIGSTOP)
        await active(fake, 0, timeout=60)
        os.kill(child.pid, signal.SIGCONT)
        yield child.stdout
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@pytest.mark.parametrize(("seconds", "replies"), [(0.5, 1 << 18), (60.0, 50)], ids=["for long", "much waits"])
async def test_a_client_that_stops_reading_is_dropped_and_comes_back(
    fake: FakeEngine, address: str, monkeypatch: pytest.MonkeyPatch, seconds: float, replies: int
) -> None:
    monkeypatch.setattr("engine.process.host._HIGH_WATER_MARK", 10)
    monkeypatch.setattr("engine.process.host.STUCK_SECONDS", seconds)
    monkeypatch.setattr("engine.process.host._MOST_WAITING", replies)
    async with host_at(address, fake), stopped_reader(fake, address) as printed:
        error, end = (await asyncio.wait_for(printed.read(), 10)).splitlines()
    assert error.startswith(b"the engine process cancelled the request: ") and end == b"length"


async def test_a_client_that_stops_reading_for_a_moment_loses_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.process.host._HIGH_WATER_MARK", 10)
    monkeypatch.setattr("engine.process.host.STUCK_SECONDS", 60.0)  # generating takes a second, on a quiet machine
    fast = FakeEngine(FakeConfig())
    await fast.start()
    async with host_at(address, fast), stopped_reader(fast, address) as printed:
        assert await asyncio.wait_for(printed.read(), 60) == b"%d\nlength\n" % FOREVER
    await fast.close()


async def test_a_host_that_goes_and_comes_back(fake: FakeEngine, address: str, client: EngineClient) -> None:
    async with host_at(address, fake):
        await client.start()
        running = [asyncio.create_task(collect(client.generate(request_for(FOREVER)))) for _ in range(30)]
        await active(fake, 30)
        lost = asyncio.get_running_loop().time()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(result, EngineDied) for result in results)
    assert asyncio.get_running_loop().time() - lost < SILENCE_SECONDS - 1
    assert not client.healthy
    with pytest.raises(EngineNotReady):
        await collect(client.generate(request_for()))
    other = FakeEngine(FakeConfig(model="other"))
    await other.start()
    async with host_at(address, other):
        async with asyncio.timeout(20):
            while not client.healthy:  # noqa: ASYNC110 - health is a property, there is nothing to wait on
                await asyncio.sleep(0.01)
        assert client.info.model == "other"
        assert (await collect(client.generate(request_for())))[-1].finish_reason == "length"
    await other.close()


async def test_statistics_and_events_go_on_at_the_next_host(
    fake: FakeEngine, address: str, client: EngineClient
) -> None:
    events, stats = client.kv_events(), client.stats()
    for completed in (1, 2):
        async with host_at(address, fake):
            if completed == 1:
                await client.start()
            async with asyncio.timeout(20):
                while not client.healthy:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await collect(client.generate(request_for(64, prompt=(completed + 5,))))
                while (await anext(stats)).num_completed_requests != completed:
                    pass
                assert await anext(events)
        async with asyncio.timeout(20):
            while client.healthy:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_garbage_harms_nobody(
    fake: FakeEngine, address: str, client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with host_at(address, fake):
        await client.start()
        dealer = context().socket(zmq.DEALER)
        dealer.connect(address)
        for payload in (
            b"",
            b"\xc1",
            b"\x93\x01\x02\x03",
            wire.encode(wire.Commands(1, [wire.Call(1, "generate", Raw(wire.encode(request_for())))])),
        ):
            dealer.send(payload)
        assert (await collect(client.generate(request_for(100))))[-1].finish_reason == "length"
        assert (await active(fake, 0)).num_completed_requests == 1, "a request without a greeting is ignored"
        assert "ignored" in caplog.text
        dealer.close(linger=0)


async def test_messages_too_large_fail_alone(
    fake: FakeEngine, address: str, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 20_000)
    huge = replace(request_for(1, (5,) * 3_000), sampling=SamplingParams(max_tokens=1, prompt_logprobs=20))
    wide = [request_for(1, (500,) * 3_000) for _ in range(5)]
    too_wide = request_for(1, (500,) * 7_000)
    image = MediaSpan(key="0" * 64, start=0, length=1, rows=1, dtype="float32", data=bytes(20_000))
    too_seen = replace(request_for(5), media=MediaSpans((image,)))
    too_raw = replace(request_for(5), media=MediaFiles("", (MediaInput(bytes(15_000)),) * 2))
    async with host_at(address, fake):
        await client.start()
        wanted = (huge, too_wide, too_seen, too_raw, *wide, request_for(100))
        failed, *others = await asyncio.gather(
            *(collect(client.generate(request)) for request in wanted), return_exceptions=True
        )
        assert isinstance(failed, EngineFailure)
        assert all(isinstance(refused, InvalidRequest) for refused in others[:3])
        assert all(isinstance(deltas, list) and deltas[-1].finish_reason == "length" for deltas in others[3:])


async def test_a_bug_in_the_engine_is_a_failure_of_the_request(
    address: str, client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy(FakeEngine):
        def generate(self, request: GenerateRequest) -> Any:
            raise ZeroDivisionError("a bug")

    buggy = Buggy(FakeConfig())
    await buggy.start()
    async with host_at(address, buggy):
        await client.start()
        with pytest.raises(EngineFailure):
            await collect(client.generate(request_for()))
        assert "ZeroDivisionError" in caplog.text
    await buggy.close()


async def test_health_follows_the_engine_and_the_host_ends(
    fake: FakeEngine, address: str, client: EngineClient
) -> None:
    host = ServiceHost(ENGINE, fake, bind(address))
    serving = asyncio.create_task(host.serve())
    await client.start()
    await fake.close()
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(serving, 20)
    async with asyncio.timeout(20):
        while client.healthy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    host.close()
