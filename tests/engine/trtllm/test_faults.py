"""Faults around TensorRT-LLM's executor while it lives, or that it does not report.

Each ends one request, one poll, or the engine.
"""

import logging
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgspec
import pytest

from engine.config import TrtllmConfig, TrtllmEncoderConfig
from engine.errors import (
    EngineDied,
    EngineError,
    EngineFailure,
    EngineNotReady,
    EngineUnavailable,
    InvalidRequest,
)
from engine.kit.handoff import VERSION
from engine.media import Encoding
from engine.process.wire import HostOptions
from engine.transfer.process_id import shared_memory_domain
from engine.trtllm import watching
from engine.trtllm.disaggregation import BACKEND, EncoderState
from engine.trtllm.encoder import TrtllmEncoder
from engine.trtllm.engine import TrtllmEngine
from engine.trtllm.outputs import Outputs
from engine.trtllm.polling import stats_poller
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.environment import python_path
from tests.support.servers import application
from tests.support.trtllm import faults, found, handed_over, picture, registered
from tests.support.trtllm_gotchas import request, running, tokens
from tests.support.waiting import slowness, until

trt, folder = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder  # fixtures
REFUSALS: list[tuple[Exception, type[EngineError]]] = [
    (AssertionError("no such thing"), InvalidRequest),
    (AssertionError(), InvalidRequest),
    (RuntimeError("an internal error"), EngineFailure),
    (NotImplementedError("not with this model"), InvalidRequest),
    (RuntimeError("mrope_position_deltas_handle is missing"), InvalidRequest),
    (TypeError("wrong"), InvalidRequest),
    (ValueError("wrong"), InvalidRequest),
    (AttributeError("Can't pickle local object"), EngineFailure),
    (pickle.PicklingError("Can't pickle it"), EngineFailure),
    (KeyError("what"), EngineFailure),
    (OSError("Too many open files"), EngineFailure),
]


def raising(error: Exception) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


async def test_a_missing_package_is_told_with_a_cure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)  # what importing it then raises is an ImportError
    engine = TrtllmEngine(TrtllmConfig(model=str(folder)))
    with pytest.raises(EngineFailure, match=r"tensorrt_llm cannot be imported .* docs/tensorrt-llm\.md"):
        await engine.start()


async def test_errors_at_submission_fail_one_request_while_the_executor_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder) as engine:
        other = engine.generate(request(request_id="other", max_tokens=4000))
        assert (await anext(other)).token_ids
        for error, kind in REFUSALS:
            with monkeypatch.context() as patch:
                patch.setattr(found("tensorrt_llm.LLM"), "generate_async", raising(error))
                with pytest.raises(kind, match=str(error) or "AssertionError") as caught:
                    await tokens(engine, request())
            assert type(caught.value) is kind
        assert engine.healthy and (await anext(other)).token_ids and await tokens(engine, request())


async def test_errors_at_submission_end_the_engine_once_the_executor_has_gone(folder: Path) -> None:
    async with running(folder) as engine:
        found("tensorrt_llm._test").kill_executors()
        with pytest.raises(EngineDied, match="shutting down"):
            await tokens(engine, request())
        assert not engine.healthy


CLASSES: list[tuple[str, type[EngineError]]] = [
    ("The sum of prompt length (9.0), query length (0) should not exceed max_num_tokens (8)", InvalidRequest),
    ("Token ID out of range", InvalidRequest),
    ("Guided decoding error: invalid grammar: CUDA error", InvalidRequest),
    ("Guided decoding error: internal error in _build", EngineFailure),
    ("Error in kv cache transfer for generation requests", EngineUnavailable),
    ("Request 7 timed out", EngineUnavailable),
    ("total_num_tokens (9) should be less than 8", EngineFailure),
    ("'NoneType' object is not subscriptable", EngineFailure),
    ("CUDA error: an illegal memory access was encountered", EngineDied),
    ("CUDA out of memory. Tried to allocate 2.00 GiB", EngineDied),
    ("cudaErrorLaunchFailure", EngineDied),
    ("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error", EngineDied),
    ("NCCL watchdog: collective operation timed out", EngineDied),
    ("Hang detected on rank 0 in PyExecutor.", EngineDied),
]


@pytest.mark.parametrize(("message", "kind"), CLASSES)
async def test_a_request_error_is_whose_fault_its_message_says(
    folder: Path, message: str, kind: type[EngineError]
) -> None:
    async with running(folder) as engine:
        faults().request_error = message
        with pytest.raises(EngineError, match=re.escape(message)) as caught:
            await tokens(engine, request())
        assert type(caught.value) is kind and engine.healthy == (kind is not EngineDied)
        if kind is not EngineDied:
            assert await tokens(engine, request())


@pytest.mark.parametrize("message", ["CUDA error: an illegal memory access was encountered", "an unknown error"])
async def test_a_broken_gpu_ends_the_engine_though_its_executor_stays_healthy(folder: Path, message: str) -> None:
    """1.2.1 answers an error of a step to every request, and goes on. An unknown one is put to the test."""
    async with running(folder) as engine:
        others = [engine.generate(request(request_id=str(number), max_tokens=4000)) for number in range(3)]
        for other in others:
            assert (await anext(other)).token_ids
        faults().device_error = message
        for other in others:
            with pytest.raises((EngineDied, EngineFailure), match=message):
                _ = [delta async for delta in other]
        await until(lambda: not engine.healthy)
        assert engine.llm._check_health()
        with pytest.raises(EngineNotReady):
            await tokens(engine, request())


async def test_a_gpu_that_fails_in_our_process_is_not_the_requests_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(found("tensorrt_llm.LLM"), "generate_async", raising(RuntimeError("CUDA out of memory")))
            with pytest.raises(EngineDied, match="out of memory"):
                await tokens(engine, request())
        assert not engine.healthy


async def test_a_processor_that_cannot_be_pickled_fails_its_request_alone(folder: Path) -> None:
    with registered(local=lambda: lambda token_ids, scores: None):
        async with running(folder, disable_overlap_scheduler=True) as engine:
            with pytest.raises(EngineFailure, match="pickle"):
                await tokens(engine, request(processors=("local",)))
            assert engine.healthy and await tokens(engine, request())


async def test_one_mrope_handle_without_the_other_is_the_requests_fault(folder: Path) -> None:
    handle, memory = {"method_key": 2}, shared_memory_domain()
    state = msgspec.msgpack.encode(EncoderState([handle], mrope_position_ids_handle=handle, memory=memory))
    encoding = Encoding(version=VERSION, backend=BACKEND, prompt="w5 <image>", state=state)
    async with running(folder, "prefill") as engine:
        with pytest.raises(InvalidRequest, match="mrope_position_deltas_handle"):
            await handed_over(engine, request(media=encoding))
        assert engine.healthy and await tokens(engine, request())


async def test_an_encoders_refusals_are_one_requests_while_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = TrtllmEncoder(TrtllmEncoderConfig(model=str(folder)))
    await encoder.start()
    kind = found("tensorrt_llm.llmapi.MultimodalEncoder")
    try:
        for error, expected in REFUSALS:
            with monkeypatch.context() as patch:
                patch.setattr(kind, "generate_async", raising(error))
                with pytest.raises(expected):
                    await encoder.encode([picture()], "<image>")
        with monkeypatch.context() as patch:  # a result that fails, though the executor runs
            patch.setattr(
                found("tensorrt_llm.executor.result").GenerationResult, "_step", raising(ValueError("lengths differ"))
            )
            with pytest.raises(EngineFailure, match="lengths differ"):
                await encoder.encode([picture()], "<image>")
        assert encoder.healthy and (await encoder.encode([picture()], "<image>")).state
        found("tensorrt_llm._test").kill_executors()
        with pytest.raises(EngineDied):
            await encoder.encode([picture()], "<image>")
        assert not encoder.healthy
    finally:
        await encoder.close()
    with pytest.raises(EngineNotReady):
        await encoder.encode([picture()], "<image>")


async def test_a_response_that_cannot_be_understood_ends_its_request_here_and_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(folder) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Outputs, "_delta", raising(TypeError("None")))
            with pytest.raises(EngineFailure, match="malformed response"):
                await tokens(engine, request(max_tokens=4000))
        await until(lambda: not engine.llm._executor.jobs)
        assert engine.healthy and await tokens(engine, request())


async def test_polling_continues_after_malformed_reports_and_logs_them_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken: list[Any] = [{"iter": "seven"}, {"kvCacheStats": {"maxNumBlocks": "x"}}, None]
    polls: Iterator[Any] = iter(
        [[*broken, {"iter": 7}], *[[{"iter": "x"}] for _ in range(10)], KeyError("type"), [{"iter": 8}]]
    )

    class Llm:
        def get_stats(self, timeout: float) -> Any:
            poll: Any = next(polls, [])
            if isinstance(poll, Exception):
                raise poll
            return poll

    published: list[int] = []
    poller = stats_poller(Llm(), lambda stats: published.append(stats.iteration))
    await until(lambda: published == [7, 8])
    await poller.stop()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(": ")[1] for line in warned] == [
        "ValueError",
        "ValidationError",
        "AttributeError",
        "ValueError",
        "KeyError",
    ]
    assert "10 so far" in warned[3] and "a poll of the engine's statistics" in warned[4]


async def test_a_poll_that_waits_holds_up_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.2.1 blocks the thread that polls, for as long as nothing happens."""
    done = threading.Event()
    waiting: set[str] = set()

    def waits(name: str) -> Callable[..., list[Any]]:
        def call(self: Any, timeout: float | None = 2) -> list[Any]:
            if first:
                return []
            waiting.add(name)
            assert done.wait(20), "the event loop had no chance to end this"
            return []

        return call

    first = True
    for name in ("get_stats", "get_kv_cache_events"):
        monkeypatch.setattr(found("tensorrt_llm.LLM"), name, waits(name))
        monkeypatch.setattr(found("tensorrt_llm.LLM"), f"{name}_async", waits(name))
    async with running(folder, kv_cache_config={"event_buffer_max_size": 100}) as engine:
        first = False
        try:
            await until(lambda: len(waiting) == 2)
            assert len(await tokens(engine, request())) == 6
        finally:
            done.set()


async def test_a_task_that_ends_is_the_engines_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(folder) as engine:
        stream = engine.generate(request(max_tokens=4000))
        assert (await anext(stream)).token_ids
        monkeypatch.setattr(TrtllmEngine, "_publish", raising(ZeroDivisionError("a bug")))
        await tokens(engine, request(request_id="short"))
        with pytest.raises(EngineDied, match="internal task failed"):
            _ = [delta async for delta in stream]
        assert not engine.healthy and "a bug" in caplog.text
        monkeypatch.undo()


async def test_an_executor_whose_health_check_fails_is_unhealthy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "HEALTH_SECONDS", 0.05)
    async with running(folder) as engine:
        assert engine.healthy
        monkeypatch.setattr(found("tensorrt_llm.LLM"), "_check_health", raising(OSError("broken pipe")))
        await until(lambda: not engine.healthy)


def reporting(monkeypatch: pytest.MonkeyPatch, **cache: Any) -> None:
    """Have the executor's statistics say this of its cache."""
    original = found("tensorrt_llm._executor").stats_item

    def item(*args: Any) -> Any:
        said = original(*args)
        return said | {"kvCacheStats": said["kvCacheStats"] | cache}

    monkeypatch.setattr(found("tensorrt_llm._executor"), "stats_item", item)


@pytest.mark.parametrize("cache", [{"maxNumBlocks": 0}, {"tokensPerBlock": -1}])
async def test_a_cache_that_holds_nothing_stops_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cache: dict[str, int]
) -> None:
    reporting(monkeypatch, **cache)
    with pytest.raises(EngineFailure, match="no memory is left"):
        async with running(folder):
            pass
    assert found("tensorrt_llm._test").live() == 0


@pytest.mark.parametrize("cache", [{"maxNumBlocks": None}, {"maxNumBlocks": "many"}])
async def test_a_cache_of_unknown_size_starts_with_the_block_size_that_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: dict[str, Any]
) -> None:
    reporting(monkeypatch, **cache)
    async with running(folder, kv_cache_config={"tokens_per_block": 64}) as engine:
        assert (engine.info.num_blocks, engine.info.block_size) == (0, 64)
    assert "does not report the size of its KV cache" in caplog.text


async def test_facts_are_the_engines_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts are as reported by the engine, not as set.

    They are block size and capacity, the ranks of attention DP, and how long loading took, without what follows it.
    """
    monkeypatch.setenv("FAKE_TRTLLM_GPUS", "4")
    found("tensorrt_llm._test").faults.construction_seconds = 0.3
    reporting(monkeypatch, tokensPerBlock=128, maxNumBlocks=77)
    parallel = {"tensor_parallel_size": 4, "enable_attention_dp": True, "kv_cache_config": {"tokens_per_block": 64}}
    async with running(folder, **parallel) as engine:
        info = engine.info
    assert (info.block_size, info.num_blocks, info.data_parallel_size, info.tensor_parallel_size) == (128, 77, 4, 1)
    assert 0.3 <= info.load_seconds < 5 * slowness()
    async with running(folder, tensor_parallel_size=4) as engine:
        assert (engine.info.data_parallel_size, engine.info.tensor_parallel_size) == (1, 4)


async def test_metrics_show_how_long_loading_took_and_the_size_of_things() -> None:
    async with application() as (client, _):
        page = (await client.get("/metrics")).text.splitlines()
    values = {line.split("{")[0]: float(line.rpartition(" ")[2]) for line in page if line.startswith("trtllm_")}
    assert values["trtllm_kv_cache_block_size"] == 32 and values["trtllm_kv_cache_max_blocks"] == 65536
    assert values["trtllm_data_parallel_size"] == 1 and values["trtllm_model_load_time_seconds"] >= 0


HANGING = """
import sys, threading
from dataclasses import replace
from engine.process import host
from engine.process.engine_service import ENGINE
from engine.trtllm import library

library.shutdown = lambda llm: threading.Event().wait()
library.is_alive = lambda llm: False
sys.exit(host.main(replace(ENGINE, more_stop_seconds=lambda config: 0.0)))
"""


@pytest.mark.slow
def test_an_engine_that_hangs_while_it_closes_does_not_keep_its_process(folder: Path, tmp_path: Path) -> None:
    """A hanging shutdown does not keep the process from ending.

    The executor is found dead and shutting it down never ends; the process ends in time all the same, and another can
    be started.
    """
    config = msgspec.Raw(msgspec.json.encode(TrtllmConfig(model=str(folder))))
    options = HostOptions(config, f"ipc://{tmp_path}/engine.sock")
    environment = {**os.environ, "PYTHONPATH": python_path(FAKE_TRTLLM)}
    process = subprocess.Popen([sys.executable, "-c", HANGING], stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment)
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(options) + b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        assert process.wait(20) == 1
    finally:
        process.kill()
        process.communicate()


BLOCKED = """
import asyncio, sys, time
from engine.config import TrtllmConfig
from engine.trtllm import engine, library, watching

async def main():
    running = engine.TrtllmEngine(TrtllmConfig(model=sys.argv[1]))
    await running.start()
    library.is_alive = lambda llm: False
    time.sleep(60)

watching.HEALTH_SECONDS, watching.BLOCKED_SECONDS = 0.05, 0.2
asyncio.run(main())
"""


@pytest.mark.slow
def test_an_executor_that_blocks_the_event_loop_while_it_shuts_down_ends_the_process(folder: Path) -> None:
    """Nothing else could: the death waits for the loop, and whoever restarts the process waits for its end."""
    environment = {**os.environ, "PYTHONPATH": python_path(FAKE_TRTLLM)}
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(folder)], env=environment, capture_output=True, timeout=50, check=False
    )
    assert ended.returncode == 1 and b"ending the process" in ended.stderr


async def test_null_takes_a_nested_configuration_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of 1.2.1's makes classes of nested configurations, and cannot make one of null."""
    module = found("tensorrt_llm.llmapi.llm_args")
    original = module.update_llm_args_with_extra_dict

    def update(llm_args: dict[str, Any], extra: dict[str, Any]) -> Any:
        assert None not in extra.values()
        return original(llm_args, extra)

    monkeypatch.setattr(module, "update_llm_args_with_extra_dict", update)
    async with running(folder, speculative_config=None, cuda_graph_config=None) as engine:
        assert engine.llm.args.speculative_config is None and engine.llm.args.cuda_graph_config is None


async def test_an_engine_and_an_encoder_are_closed_where_their_block_ends(folder: Path) -> None:
    for made in (
        TrtllmEngine(TrtllmConfig(model=str(folder))),
        TrtllmEncoder(TrtllmEncoderConfig(model=str(folder))),
    ):
        with pytest.raises(ZeroDivisionError):
            async with made:
                assert made.healthy
                raise ZeroDivisionError
        assert not made.healthy and found("tensorrt_llm._test").live() == 0


async def test_requests_may_have_one_id(folder: Path) -> None:
    """The engine gives its own, so that ours say nothing: neither is taken for the other, running or just over."""
    async with running(folder) as engine:
        both = [engine.generate(request(max_tokens=length)) for length in (5, 40)]
        assert [sum([len(delta.token_ids) async for delta in stream]) for stream in both] == [5, 40]
        await until(lambda: not engine.streams)
