"""Hosting of a service other than an engine, in another process, with calls that have one result."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from engine.errors import EngineDied, EngineFailure, EngineNotReady, InvalidRequest
from engine.process import wire
from engine.process.child import ServiceProcess, SpareHost
from engine.transfer.shared_bytes import SharedBytes
from tests.support.environment import bare
from tests.support.greeting import GREETER, GreeterClient, GreeterConfig, GreeterInfo, Greeting, Person


async def until(found: list[int], wanted: int) -> None:
    async with asyncio.timeout(20):
        while found[-1:] != [wanted]:  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0.005)


@pytest.fixture
async def process() -> AsyncIterator[ServiceProcess]:
    process = ServiceProcess(GREETER, GreeterConfig("hello"))
    await process.start()
    yield process
    await process.close()


@pytest.fixture
async def client(process: ServiceProcess) -> AsyncIterator[GreeterClient]:
    client = GreeterClient(GREETER, process.address, process.wait_failed)
    await asyncio.wait_for(client.start(), 15)
    yield client
    await client.close()


async def info_with(spare: SpareHost) -> GreeterInfo:
    """Start a service in a spare process, and return its info."""
    process = ServiceProcess(GREETER, GreeterConfig("hello"), spare=spare)
    await process.start()
    client = GreeterClient(GREETER, process.address, process.wait_failed)
    try:
        await asyncio.wait_for(client.start(), 15)
        return client.info
    finally:
        await client.close()
        await process.close()


@pytest.mark.parametrize("hint", ["cuda", "missing"])
async def test_a_process_may_be_spawned_before_its_configuration_is_known(hint: str) -> None:
    spare = await SpareHost.spawn(GREETER, hint)
    info = await info_with(spare)
    assert (info.greeting, info.hints) == ("hello", (hint,))
    await spare.close()
    assert (await info_with(spare)).hints == (), "it is there once"


async def test_a_process_that_nobody_needed_is_ended() -> None:
    spare = await SpareHost.spawn(GREETER, "cuda")
    process = spare.process
    assert process is not None
    await spare.close()
    assert process.returncode is not None
    assert (await info_with(spare)).hints == (), "a new one was spawned"


async def test_a_process_that_died_meanwhile_is_replaced() -> None:
    spare = await SpareHost.spawn(GREETER, "cuda")
    assert spare.process is not None
    spare.process.kill()
    await spare.process.wait()
    assert (await info_with(spare)).hints == ()


async def test_calls_have_results_and_errors_keep_their_types(client: GreeterClient) -> None:
    assert client.info.greeting == "hello" and client.info.started and client.healthy
    assert await asyncio.gather(*(client.greet(Person(name)) for name in "abc")) == [
        Greeting(f"hello, {name}") for name in "abc"
    ]
    with pytest.raises(InvalidRequest, match="needs a name") as caught:
        await client.greet(Person(""))
    assert caught.value.param == "name"
    with pytest.raises(EngineFailure, match="internal error of the greeter"):
        await client.greet(Person("bug"))
    with pytest.raises(InvalidRequest, match="the request is too large"):
        await client.greet(Person("x" * wire.MAX_MESSAGE_BYTES))


@pytest.mark.parametrize("shared", [False, True])
async def test_parts_travel_beside_the_call(client: GreeterClient, shared: bool) -> None:
    picture = bytes(1 << 20)
    data = SharedBytes.of(picture) if shared else picture
    assert await client.greet(Person("a", data)) == Greeting("hello, a", len(picture))


async def test_a_cancelled_call_is_cancelled_in_the_service(client: GreeterClient) -> None:
    counts: list[int] = []
    client.watch(counts)
    calls = [asyncio.create_task(client.greet(Person("Godot"))) for _ in range(3)]
    await until(counts, 3)
    calls[0].cancel()
    await until(counts, 2)
    await client.close()
    for call in calls[1:]:
        with pytest.raises(EngineNotReady, match="the greeter is closing"):
            await call


async def test_a_killed_process_fails_its_calls_and_the_next_one_answers(
    process: ServiceProcess, client: GreeterClient
) -> None:
    counts: list[int] = []
    client.watch(counts)
    call = asyncio.create_task(client.greet(Person("Godot")))
    await until(counts, 1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="the greeter process was lost"):
        await call
    with pytest.raises(EngineNotReady):
        await client.greet(Person("a"))
    await until(counts, 0)
    assert await client.greet(Person("a")) == Greeting("hello, a")


async def test_a_service_that_cannot_start_reports_the_reason() -> None:
    process = ServiceProcess(GREETER, GreeterConfig(""))
    await process.start()
    try:
        with pytest.raises(EngineFailure) as caught:
            await GreeterClient(GREETER, process.address, process.wait_failed).start()
        assert str(caught.value) == "the greeter process failed to start: there is no greeting"
    finally:
        await process.close()


IN_JSON = """
import asyncio
from engine.kit import logs
from engine.process.child import ServiceProcess
from tests.support.greeting import GREETER, GreeterClient, GreeterConfig

async def main():
    process = ServiceProcess(GREETER, GreeterConfig("print"))
    await process.start()
    client = GreeterClient(GREETER, process.address, process.wait_failed)
    await client.start()
    await client.close()
    await process.close()

logs.configure(logs.LogOptions("info", "json"))
asyncio.run(main())
"""


def test_every_line_of_a_process_is_json_in_a_json_log() -> None:
    """Those of our loggers, warnings, and what a library prints, also without an end of line."""
    run = subprocess.run([sys.executable, "-c", IN_JSON], capture_output=True, text=True, check=True, env=bare())
    entries = [json.loads(line) for line in run.stderr.splitlines()]
    said = {entry["message"]: (entry["level"], entry["logger"]) for entry in entries}
    assert said["a line of ours"] == ("info", "tests.support.greeting")
    assert said["printed by a library"] == said["not ended"] == ("warning", "engine.process.output")
    assert any("a warning of Python" in message for message in said)
    assert all(entry["time"].endswith("Z") for entry in entries)


async def test_a_bug_at_the_start_is_named_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    process = ServiceProcess(GREETER, GreeterConfig("bug"))
    await process.start()
    try:
        with pytest.raises(EngineFailure, match=r"failed to start: KeyError: 'bug' \(LOG_LEVEL=debug shows where\)"):
            await GreeterClient(GREETER, process.address, process.wait_failed).start()
    finally:
        await process.close()
    assert "Traceback" not in capfd.readouterr().err
