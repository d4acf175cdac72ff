"""The engine's child process: started, killed, restarted, given up and never left behind."""

import asyncio
import itertools
import logging
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from engine.config import EmbeddedConfig, FakeConfig
from engine.errors import EngineDied, EngineFailure, EngineNotReady
from engine.memory.service import MemoryService
from engine.process import wire
from engine.process.child import EngineProcess
from engine.process.client import EngineClient
from engine.process.wire import SILENCE_SECONDS
from engine.types import Delta, GenerateRequest, SamplingParams
from tests.engine.embedded.models.native.test_native import make_folder
from tests.support.waiting import slowness, until

_ids = itertools.count()
CONFIG = FakeConfig(token_delay=0.002)


def request_for(max_tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(next(_ids)),
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def healthy(client: EngineClient, wanted: bool, timeout: float) -> None:
    async with asyncio.timeout(timeout):
        while client.healthy is not wanted:  # noqa: ASYNC110 - health is a property, there is nothing to wait on
            await asyncio.sleep(0.005)


def gone(pid: int, timeout: float = 20.0) -> bool:
    """Whether the process ends in time; one that nobody has waited for yet counts as ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


async def test_close_leaves_nothing_behind() -> None:
    process = EngineProcess(CONFIG)
    folder = Path(process.address.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o077 == 0
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    stream = client.generate(request_for(10_000))
    await anext(stream)
    running = asyncio.create_task(collect(stream))
    pid = process.pid
    assert pid is not None
    await process.close()
    with pytest.raises(EngineDied):
        await running
    assert not psutil.pid_exists(pid) and process.pid is None
    assert not folder.exists()
    await client.close()
    await process.close()


async def test_close_before_the_host_is_ready() -> None:
    process = EngineProcess(CONFIG)
    await process.start()
    pid = process.pid
    await process.close()
    assert pid is not None and not psutil.pid_exists(pid)
    await EngineProcess(CONFIG).close()


async def test_close_ends_a_host_that_does_not_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.child.STOP_SECONDS", 0.3)
    process = EngineProcess(CONFIG)
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await process.close()
    assert not psutil.pid_exists(pid)
    await client.close()


async def test_kill_under_load_fails_each_request_and_the_next_host_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    process = EngineProcess(CONFIG)
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    pid = process.pid
    assert pid is not None
    streams = [client.generate(request_for(10_000)) for _ in range(100)]
    await anext(streams[0])
    running = [asyncio.create_task(collect(stream)) for stream in streams]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(result, EngineDied) for result in results)
    assert time.monotonic() - killed < (SILENCE_SECONDS - 1) * slowness()
    assert not client.healthy
    with pytest.raises(EngineNotReady):
        await collect(client.generate(request_for()))
    await healthy(client, True, 15)
    assert process.pid not in (None, pid)
    await until(lambda: "the engine process is ready again" in caplog.messages)  # which another pipe says
    lines = ["restarting in 0.5 s: the engine process died (signal SIGKILL)", "the engine process is ready again"]
    assert [line for line in caplog.messages if "ready" in line or "restarting" in line] == lines
    assert (await collect(client.generate(request_for())))[-1].finish_reason == "length"
    second = process.pid
    await client.close()
    await process.close()
    assert second is not None and not psutil.pid_exists(pid) and not psutil.pid_exists(second)


async def test_requests_around_a_restart_never_hang() -> None:
    process = EngineProcess(CONFIG)
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    outcomes: list[str] = []

    async def keep_asking() -> None:
        while outcomes.count("length") < 50:
            try:
                deltas = await asyncio.wait_for(collect(client.generate(request_for(20))), 20)
                outcomes.append(deltas[-1].finish_reason or "")
            except (EngineDied, EngineNotReady) as error:
                outcomes.append(type(error).__name__)
                await asyncio.sleep(0.01)

    asking = [asyncio.create_task(keep_asking()) for _ in range(10)]
    await until(lambda: len(outcomes) >= len(asking))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await healthy(client, False, 15)
    await healthy(client, True, 15)
    outcomes.clear()
    await asyncio.wait_for(asyncio.gather(*asking), 30)
    assert set(outcomes) == {"length"}
    await client.close()
    await process.close()


async def test_a_host_that_cannot_come_back_is_tried_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.process.supervisor.FIRST_PAUSE", 0.01)
    folder = tmp_path / "folder"
    folder.mkdir()
    process = EngineProcess(CONFIG, address=f"ipc://{folder}/s")
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    folder.rename(tmp_path / "elsewhere")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: len(caplog.records) >= 3, 15)
    folder.mkdir()
    await healthy(client, True, 15)
    pauses = [record.getMessage().partition(":")[0] for record in caplog.records[:3]]
    assert pauses == [f"restarting in {seconds} s" for seconds in (0.01, 0.02, 0.04)]
    assert "failed to start: ZMQError: No such file or directory" in caplog.records[1].getMessage()
    await client.close()
    await process.close()


async def test_a_child_of_the_host_that_outlives_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nsleep 60 </dev/null >&2 &\necho $! >> {tmp_path}/pids\nexec {sys.executable} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    process = EngineProcess(CONFIG)
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    await healthy(client, False, 15)
    await healthy(client, True, 15)
    await client.close()
    await asyncio.wait_for(process.close(), 20)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and all(gone(int(pid), 0.1) for pid in pids)


async def test_exit_mode_gives_up_at_the_first_death() -> None:
    process = EngineProcess(CONFIG, on_death="exit")
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert "died (signal SIGKILL)" in await asyncio.wait_for(process.wait_failed(), 20)
    await until(lambda: process.pid is None and not client.healthy)
    await client.close()
    await process.close()


async def test_a_host_that_cannot_start_fails_the_start_with_its_last_words(tmp_path: Path) -> None:
    process = EngineProcess(CONFIG, address=f"ipc://{tmp_path}/missing/s")
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    with pytest.raises(EngineFailure, match="failed to start: ZMQError: No such file or directory"):
        await asyncio.wait_for(client.start(), 15)
    assert process.pid is None
    await client.close()
    await process.close()


async def test_a_model_that_is_not_there_fails_the_start_by_name(tmp_path: Path) -> None:
    process = EngineProcess(EmbeddedConfig(model=str(tmp_path / "no-such-model")))
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    try:
        with pytest.raises(EngineFailure, match="no-such-model"):
            await asyncio.wait_for(client.start(), 60)
    finally:
        await process.close()


@pytest.mark.parametrize("host_state", ["running", "stuck"])
async def test_the_host_ends_with_a_parent_that_is_killed(tmp_path: Path, host_state: str) -> None:
    code = """
        import asyncio, sys
        from engine.process.client import EngineClient
        from engine.config import FakeConfig
        from engine.process.child import EngineProcess
        from engine.types import GenerateRequest, SamplingParams

        async def main():
            process = EngineProcess(FakeConfig(token_delay=0.002, context_length=1 << 30), address=sys.argv[1])
            await process.start()
            client = EngineClient(process.address, process.wait_failed)
            await client.start()
            # A prompt of a million tokens with log-probabilities is one step of a minute.
            length, logprobs = (5, None) if sys.argv[2] == "running" else (1_000_000, 20)
            sampling = SamplingParams(max_tokens=1_000_000, prompt_logprobs=logprobs)
            stream = client.generate(GenerateRequest(request_id="x", prompt_token_ids=(5,) * length, sampling=sampling))
            await asyncio.sleep(0.5)
            print(process.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    address = tmp_path / "s"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(code), f"ipc://{address}", host_state, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    parent.kill()
    await parent.wait()
    assert await asyncio.to_thread(gone, pid)
    assert not address.exists()


async def test_a_standby_engine_takes_over_from_killed_ones_with_the_weights_it_has_mapped(
    tmp_path: Path, memory_service: MemoryService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kills under load, for a standby with weights and one without: equal answers, one copy of the weights, and no
    lease or process too many."""
    monkeypatch.setattr("engine.process.child.STANDBY_PAUSE", 0.0)
    folder = make_folder(tmp_path / "model")
    config = EmbeddedConfig(model=str(folder), memory_service=str(memory_service.path), num_blocks=64, guide_workers=1)
    process = EngineProcess(config, standby="model")
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    answers, pids = [], {process.pid}
    for kill in range(3):
        await until(lambda: process.standby_pid is not None, 60)
        (owned,) = memory_service.status.owned
        leases = (owned.leases, memory_service.status.filled, memory_service.status.granted)
        assert leases == [(2, 1, 1), (1, 1, 1), (1, 1, 2)][kill]
        process.standby = "imports"  # the next ones map no weights
        answers.append([token for delta in await collect(client.generate(request_for())) for token in delta.token_ids])
        if kill == 2:
            break
        streams = [client.generate(request_for(400)) for _ in range(4)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        running = [asyncio.create_task(collect(stream)) for stream in streams]
        standby, died = process.standby_pid, process.pid
        assert died is not None
        os.kill(died, signal.SIGKILL)
        assert all(isinstance(end, EngineDied) for end in await asyncio.gather(*running, return_exceptions=True))
        await healthy(client, True, 30)
        assert process.pid == standby
        pids.add(standby)
    assert answers[0] == answers[1] == answers[2] and answers[0]
    assert (process.restarts, process.takeovers, len(pids)) == (2, 2, 3)
    last = process.standby_pid
    await client.close()
    await process.close()
    assert last is not None and gone(last)
    await until(lambda: not memory_service.status.owned[0].leases)


def pids() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def stop_next(known: set[int]) -> int:
    """Stop the next host before it has prepared."""
    await until(lambda: pids() - known, 30)
    (pid,) = pids() - known
    os.kill(pid, signal.SIGSTOP)
    return pid


async def test_a_standby_that_dies_is_replaced_and_one_that_hangs_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.process.child.STANDBY_PAUSE", 0.0)
    process = EngineProcess(CONFIG, standby="imports")
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    await until(lambda: process.standby_pid is not None, 30)
    first, serving = process.standby_pid, process.pid
    assert first is not None and serving is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: process.standby_pid not in (None, first), 30)
    assert process.pid == serving and client.healthy and process.restarts == 0
    hanging = asyncio.create_task(stop_next(pids()))
    for _ in range(2):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await healthy(client, False, 15)
        await healthy(client, True, 30)
        assert process.pid != await hanging and process.takeovers == 1
    assert (await collect(client.generate(request_for())))[-1].finish_reason == "length"
    monkeypatch.setattr("engine.process.child.PREPARE_SECONDS", 0.0)
    os.kill(hanging.result(), signal.SIGKILL)
    await until(lambda: "not prepared after 0 s: killing it" in caplog.text, 30)
    await client.close()
    await process.close()


async def test_a_standby_that_nobody_asked_for_waits_until_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.process.child.STANDBY_PAUSE", 0.0)
    monkeypatch.setattr("engine.process.child.LONGEST_PAUSE", 0.0)
    asked: list[int] = []

    def free_memory() -> int:
        asked.append(1)
        return 10 * (len(asked) > 3)

    monkeypatch.setattr("engine.process.child.free_memory", free_memory)
    process = EngineProcess(CONFIG, standby="imports", standby_room=10)
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    await client.start()
    await until(lambda: process.standby_pid is not None, 30)
    assert len(asked) == 4
    await client.close()
    await process.close()


async def test_each_standby_has_the_configuration_that_the_first_host_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[wire.HostOptions] = []

    class Told:
        successor = b""

        def tell(self, line: bytes) -> None:
            told.append(msgspec.json.decode(line, type=wire.HostOptions))

    async def spawn(*_: object, **__: object) -> Told:
        return Told()

    monkeypatch.setattr("engine.process.child._Host.spawn", spawn)
    process: Any = EngineProcess(CONFIG, standby="model")
    spawn = process._spawn
    # The third takes the place of the second, which names no other; one that only imports starts as the first did.
    for standby in ("", "model", "model", "imports"):
        process._host = host = await spawn(standby)
        if not standby:
            host.successor = msgspec.json.encode(msgspec.structs.replace(CONFIG, context_length=7))
    configs = [msgspec.json.decode(options.config, type=FakeConfig) for options in told]
    assert [config.context_length for config in configs] == [CONFIG.context_length, 7, 7, CONFIG.context_length]
    process._folder.close()
