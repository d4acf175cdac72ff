"""Faults that TensorRT-LLM does not notice: killed workers, hanging engines, and aborts without an answer."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import TrtllmConfig, TrtllmEncoderConfig
from engine.errors import EngineDied, EngineFailure, EngineNotReady
from engine.trtllm import engine as engine_module
from engine.trtllm import watching
from engine.trtllm.encoder import TrtllmEncoder
from engine.trtllm.engine import TrtllmEngine
from engine.trtllm.library import is_alive
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.trtllm import BOTH_VERSIONS, NEWEST, PROMPT, faults, found, handed_over, llm, picture, sampling
from tests.support.trtllm_gotchas import arguments_of, request, running, tokens
from tests.support.waiting import until

trt, folder = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder  # fixtures
HANG_SECONDS = 0.5


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "HEALTH_SECONDS", 0.02)


def impatient(folder: Path, role: Any = "aggregated", seconds: float = HANG_SECONDS, **arguments: Any) -> TrtllmEngine:
    config = TrtllmConfig(model=str(folder), arguments=arguments_of(role, arguments), hang_seconds=seconds)
    return TrtllmEngine(config)


def stand_in() -> Any:
    return found("tensorrt_llm._test")


async def all_of(stream: Any) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def test_the_stand_in_is_silent_once_a_worker_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 1.2.1: the future of the worker stays pending, so nobody is told, and a shutdown waits for ever."""
    monkeypatch.setenv("FAKE_TRTLLM_WORKERS", "2")
    engine = llm()
    pids = stand_in().worker_pids()
    result = engine.generate_async(PROMPT, sampling(max_tokens=5000), streaming=True)
    await anext(result)
    assert len(pids) == 2 and [psutil.Process(pid).cmdline()[-1] for pid in pids] == ["mpi4py.futures.server"] * 2
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            async for _ in result:
                pass
    assert is_alive(engine) and engine.get_stats(0.05) == []
    ending = asyncio.create_task(asyncio.to_thread(engine.shutdown))
    assert not (await asyncio.wait([ending], timeout=0.1))[0]
    stand_in().reset()
    await ending
    assert not any(psutil.pid_exists(pid) for pid in pids)


@BOTH_VERSIONS
async def test_a_killed_worker_ends_the_engine_though_its_executor_stays_healthy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, trt: Any
) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_WORKERS", "2")
    async with running(folder) as engine:
        stream = engine.generate(request(max_tokens=4000))
        assert (await anext(stream)).token_ids
        pid = stand_in().worker_pids()[0]
        os.kill(pid, signal.SIGKILL)
        told = trt.__version__ == NEWEST
        why = f"worker process {pid} has ended"
        with pytest.raises(EngineDied, match=f"{why}|worker was killed|shut itself down" if told else why):
            await all_of(stream)
        assert not engine.healthy and is_alive(engine.llm) != told
        with pytest.raises(EngineNotReady):
            await tokens(engine, request())


async def test_an_engine_that_hangs_ends(folder: Path) -> None:
    async with impatient(folder) as engine:
        faults().hang_after = 2
        stream = engine.generate(request(max_tokens=4000))
        with pytest.raises(EngineDied, match=r"no progress for 0\.5 s"):
            await all_of(stream)
        assert not engine.healthy and is_alive(engine.llm)


async def test_an_engine_that_hangs_ends_though_its_clients_have_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that leave sooner than the hang is noticed must not hide it: the unanswered abort is followed by a
    request of our own.
    """
    monkeypatch.setattr(engine_module, "ABORT_SECONDS", 0.05)
    async with impatient(folder) as engine:
        faults().hang_after = 1
        stream = engine.generate(request(max_tokens=4000))
        assert (await anext(stream)).token_ids
        await stream.aclose()
        await until(lambda: not engine.healthy)


async def test_an_engine_that_makes_progress_or_has_nothing_to_do_does_not_hang(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are held for decode owe nothing, and neither does a request that waits for a transfer."""
    async with impatient(folder, "prefill", 0.1) as engine:
        stream = engine.generate(request(prefill_only=True, max_tokens=5))
        assert (await anext(stream)).held is not None and engine.running == 1
        await asyncio.sleep(0.3)
        assert engine.healthy
        await stream.aclose()
        await until(lambda: not engine.running)
    monkeypatch.setenv("FAKE_TRTLLM_CONFIG", '{"token_delay": 0.02}')
    async with impatient(folder, seconds=0.4) as engine:
        assert len(await tokens(engine, request(max_tokens=40))) == 40  # twice as long


async def test_a_request_that_waits_for_its_transfer_owes_nothing(folder: Path) -> None:
    async with running(folder, "prefill") as prefill:
        handoff = await handed_over(prefill, request())
    async with impatient(folder, "decode", 0.1) as engine:
        faults().hang_after = 0
        stream = engine.generate(request(handoff=handoff))
        await until(lambda: engine.running)
        await asyncio.sleep(0.3)
        assert engine.healthy
        await stream.aclose()
        stand_in().reset()  # or closing would take for ever


async def test_the_stand_in_does_not_answer_an_abort_in_the_waiting_queue() -> None:
    with llm(max_batch_size=1) as engine:
        first = engine.generate_async(PROMPT, sampling(max_tokens=5000), streaming=True)
        await anext(first)
        waiting = engine.generate_async(PROMPT, sampling(), streaming=True)
        waiting.abort()
        await until(lambda: stand_in().requests() == 1)
        first.abort()
        assert (await first).outputs[0].finish_reason == "cancelled"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(waiting), 0.1)
        assert not waiting.finished


async def test_an_abort_in_the_waiting_queue_gets_no_answer_and_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "ABORT_SECONDS", 0.05)
    async with running(folder, max_batch_size=1) as engine:
        first = engine.generate(request(request_id="first", max_tokens=4000))
        assert (await anext(first)).token_ids
        waiting = engine.generate(request(request_id="waiting", max_tokens=4000))
        await until(lambda: engine.running == 2)
        await waiting.aclose()
        await until(lambda: engine.running == 1)
        assert engine.aborted == 1
        await first.aclose()
        await until(lambda: not engine.running and not stand_in().requests())
        assert engine.healthy and await tokens(engine, request())


async def test_requests_that_fail_again_and_again_end_the_engine_though_a_token_can_be_generated(folder: Path) -> None:
    async with running(folder) as engine:

        async def fails() -> None:
            faults().request_error = "index out of range"
            with pytest.raises((EngineFailure, EngineDied), match="index out of range"):
                await tokens(engine, request())
            await asyncio.sleep(0.01)
            await until(lambda: not stand_in().requests())  # the probe has ended: it would meet the next fault

        for _ in range(engine_module.MANY_FAILURES - 1):
            await fails()
        assert engine.healthy and await tokens(engine, request())  # a success begins anew
        for _ in range(engine_module.MANY_FAILURES - 1):
            await fails()
        assert engine.healthy
        await fails()
        assert not engine.healthy


async def test_an_encoder_whose_worker_is_killed_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_WORKERS", "1")
    async with TrtllmEncoder(TrtllmEncoderConfig(model=str(folder))) as encoder:
        assert (await encoder.encode([picture()], "<image>")).state and encoder.healthy
        stand_in().freeze()
        encoding = asyncio.create_task(encoder.encode([picture()], "<image>"))
        await until(lambda: stand_in().asked() == 2)
        os.kill(stand_in().worker_pids()[0], signal.SIGKILL)
        with pytest.raises(EngineDied):
            await encoding
        assert not encoder.healthy
        with pytest.raises(EngineNotReady):
            await encoder.encode([picture()], "<image>")
