"""The process tree of TensorRT-LLM: whichever process ends, none is left, and another engine answers."""

import asyncio
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from engine.config import FakeConfig, TrtllmConfig
from engine.errors import EngineDied, EngineFailure
from engine.process import child, tree
from engine.process.child import EngineProcess, ServiceProcess
from engine.process.client import EngineClient
from engine.types import GenerateRequest, SamplingParams
from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.environment import python_path
from tests.support.hasty import HASTY
from tests.support.trtllm import model_folder
from tests.support.waiting import slowness, until

REQUEST = GenerateRequest(
    request_id="r", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=4000, ignore_eos=True)
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrtllmConfig:
    monkeypatch.setenv("PYTHONPATH", python_path(FAKE_TRTLLM))
    monkeypatch.setenv("FAKE_TRTLLM_WORKERS", "2")
    monkeypatch.setenv("FAKE_TRTLLM_DAEMON", "deaf")
    monkeypatch.setenv("FAKE_TRTLLM_CONFIG", json.dumps({"token_delay": 0.01}))
    monkeypatch.setattr(child, "STOP_SECONDS", 2.0)
    # Without images, for which the stand-in imports torch: a second for each process. With statistics, as in a server:
    # a start waits two seconds for some.
    return TrtllmConfig(
        model=str(model_folder(tmp_path, image_token_id=None)), arguments={"enable_iter_perf_stats": True}
    )


@asynccontextmanager
async def served(config: TrtllmConfig | FakeConfig) -> AsyncIterator[tuple[EngineProcess, EngineClient]]:
    process = EngineProcess(config)
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    try:
        await client.start()
        yield process, client
    finally:
        await client.close()
        await process.close()


def below(pid: int | None) -> list[psutil.Process]:
    """The daemon and the workers."""
    found = psutil.Process(pid).children(recursive=True)
    assert [process.cmdline()[-1] for process in found].count("mpi4py.futures.server") == 2
    return found


def alive(processes: list[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.NoSuchProcess:
            pass


def ignored_signals(pid: int) -> set[int]:
    mask = int(Path(f"/proc/{pid}/status").read_text(encoding="utf-8").partition("SigIgn:\t")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


async def gone(processes: list[psutil.Process], seconds: float = 20.0) -> None:
    await until(lambda: not [*alive(processes)], seconds * slowness())


async def restarted(client: EngineClient, process: EngineProcess, pid: int | None) -> None:
    await until(lambda: client.healthy and process.pid not in (None, pid), 30 * slowness())
    stream = client.generate(REQUEST)
    assert (await anext(stream)).token_ids
    await stream.aclose()


@pytest.mark.parametrize("victim", ["worker", "host", "daemon and host", "suspended host"])
async def test_a_death_in_the_tree_fails_requests_ends_the_tree_and_brings_another(
    config: TrtllmConfig, victim: str
) -> None:
    """Workers whose parents have all died are found, too; and a host that is stopped is killed."""
    if victim == "suspended host":
        config = replace(config, hang_seconds=2.0)
    async with served(config) as (process, client):
        stream = client.generate(REQUEST)
        assert (await anext(stream)).token_ids
        host = process.pid
        assert host is not None
        processes = [psutil.Process(host), *below(host)]
        match victim:
            case "worker":
                os.kill(processes[-1].pid, signal.SIGKILL)
            case "daemon and host":
                os.kill(processes[1].pid, signal.SIGKILL)
                os.kill(host, signal.SIGKILL)
            case _:
                os.kill(host, signal.SIGKILL if victim == "host" else signal.SIGSTOP)
        with pytest.raises(EngineDied):
            async with asyncio.timeout(30 * slowness()):
                async for _ in stream:
                    pass
        await gone(processes)
        await restarted(client, process, host)
        last = [psutil.Process(process.pid), *below(process.pid)]
    assert not [*alive(last)]


async def test_an_engine_that_hangs_is_restarted(config: TrtllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_FAULTS", json.dumps({"hang_after": 2}))
    async with served(replace(config, hang_seconds=4.0)) as (process, client):
        monkeypatch.delenv("FAKE_TRTLLM_FAULTS")
        host = process.pid
        processes = [psutil.Process(host), *below(host)]
        os.kill(processes[-1].pid, signal.SIGSTOP)  # must not save it
        with pytest.raises(EngineDied, match="no progress"):
            async with asyncio.timeout(60 * slowness()):
                async for _ in client.generate(REQUEST):
                    pass
        await gone(processes)
        await restarted(client, process, host)


async def test_a_shutdown_that_never_returns_ends_in_time_with_the_tree(
    config: TrtllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_FAULTS", json.dumps({"hang_after": 2}))
    monkeypatch.setattr(child, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(TrtllmConfig, "extra_stop_seconds", 0.5)
    async with served(config) as (process, client):
        processes = [psutil.Process(process.pid), *below(process.pid)]
        stream = client.generate(REQUEST)
        assert (await anext(stream)).token_ids and (await anext(stream)).token_ids
        closing = time.monotonic()
    assert time.monotonic() - closing > 0.9, "it did not return"
    assert not [*alive(processes)]


async def test_a_worker_that_is_killed_while_the_model_loads_ends_the_start(
    config: TrtllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.2.1 waits for ever for a worker that was killed before it was ready."""
    monkeypatch.setenv("FAKE_TRTLLM_FAULTS", json.dumps({"construction_seconds": 60.0}))
    process = ServiceProcess(HASTY, config)
    await process.start()
    client = EngineClient(process.address, process.wait_failed)
    starting = asyncio.create_task(client.start())
    try:
        host = psutil.Process(process.pid)
        await until(lambda: len(host.children(recursive=True)) == 3, 30 * slowness())
        processes = [host, *below(host.pid)]
        await asyncio.sleep(2 * slowness())  # two checks
        os.kill(processes[-1].pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match="worker process"):
            await asyncio.wait_for(starting, 60 * slowness())
        assert not [*alive(processes)]
    finally:
        await client.close()
        await process.close()


@pytest.mark.parametrize("state", ["healthy", "broken"])
async def test_the_tree_ends_with_a_parent_that_is_killed(config: TrtllmConfig, state: str) -> None:
    """An engine that has lost a worker cannot end the others."""
    code = """
        import asyncio, sys
        from engine.process.client import EngineClient
        from engine.config import TrtllmConfig
        from engine.process.child import ServiceProcess
        from tests.support.hasty import HASTY

        async def main():
            config = TrtllmConfig(model=sys.argv[1], arguments={"enable_iter_perf_stats": True})
            process = ServiceProcess(HASTY, config)
            await process.start()
            client = EngineClient(process.address, process.wait_failed)
            await client.start()
            print(process.pid, flush=True)
            await asyncio.sleep(120)

        asyncio.run(main())
    """
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(code), config.model, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    host = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    processes = [psutil.Process(host), *below(host)]
    if state == "broken":
        os.kill(processes[-1].pid, signal.SIGKILL)
    parent.kill()
    await parent.wait()
    await gone(processes, 30)


async def test_workers_have_the_dispositions_of_signals_that_they_expect(config: TrtllmConfig) -> None:
    async with served(config) as (process, _):
        host = process.pid
        assert host is not None
        os.kill(host, signal.SIGTERM)  # of a service manager, while the parent drains
        os.kill(host, signal.SIGINT)
        for worker in below(host):
            assert not ignored_signals(worker.pid) & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        await asyncio.sleep(0.1)
        assert psutil.Process(host).status() != psutil.STATUS_ZOMBIE and tree.descendants(host)


async def test_any_host_whose_event_loop_is_blocked_for_too_long_is_killed() -> None:
    """The fake engine computes the log-probabilities of a prompt on the loop."""
    async with served(FakeConfig(hang_seconds=2.0, context_length=1 << 30)) as (process, client):
        host = process.pid
        sampling = SamplingParams(max_tokens=5, prompt_logprobs=20)
        stream = client.generate(
            GenerateRequest(request_id="long", prompt_token_ids=(5,) * 1_000_000, sampling=sampling)
        )
        with pytest.raises(EngineDied):
            async with asyncio.timeout(30 * slowness()):
                async for _ in stream:
                    pass
        await restarted(client, process, host)
