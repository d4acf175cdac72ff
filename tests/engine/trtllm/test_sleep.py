"""Sleep with TensorRT-LLM: the memory that 1.2.1 can release, the arguments that it needs, and errors without them."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import SleepConfig, TrtllmConfig
from engine.create import create_engine
from engine.errors import EngineFailure, NotSupported
from engine.sleep import SleepingEngine, SleepOrder
from engine.trtllm.engine import TrtllmEngine
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.trtllm import BOTH_VERSIONS, found
from tests.support.trtllm_gotchas import arguments_of, request

trt, folder = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder  # fixtures
ABLE: dict[str, Any] = {
    "orchestrator_type": "ray",
    "enable_sleep": True,
    "cuda_graph_config": None,
    "kv_cache_config": {"enable_block_reuse": False},
}


def engine_of(folder: Path, sleep: SleepConfig, **arguments: Any) -> SleepingEngine:
    engine = create_engine(
        TrtllmConfig(model=str(folder), arguments=arguments_of("aggregated", arguments), sleep=sleep)
    )
    assert isinstance(engine, SleepingEngine)
    return engine


async def tokens_of(engine: SleepingEngine) -> list[int]:
    return [token async for delta in engine.generate(request()) for token in delta.token_ids]


@BOTH_VERSIONS
async def test_with_ray_it_releases_memory_and_computes_the_same_afterwards(folder: Path) -> None:
    engine = engine_of(folder, SleepConfig(), **ABLE)
    await engine.start()
    [executor] = found("tensorrt_llm._test").executors
    before = await tokens_of(engine)
    await engine.sleep(SleepOrder(tags=("kv_cache",)))
    assert executor.released == {"kv_cache"}
    await engine.sleep(SleepOrder())
    assert executor.released == {"kv_cache", "model"}
    with pytest.raises(NotSupported, match="level 1 alone"):
        await engine.sleep(SleepOrder(2))
    await engine.wake_up()
    assert not executor.released and await tokens_of(engine) == before
    running = engine.generate(request(max_tokens=1000))
    await anext(running)
    await engine.sleep(SleepOrder(mode="abort"))
    await engine.wake_up()
    assert await tokens_of(engine) == before
    await engine.close()


@pytest.mark.parametrize("missing", ABLE)
async def test_sleep_names_the_missing_argument_and_aborts_nothing(missing: str, folder: Path) -> None:
    engine = engine_of(folder, SleepConfig(), **{name: value for name, value in ABLE.items() if name != missing})
    await engine.start()
    with pytest.raises(NotSupported, match=missing):
        await engine.sleep(SleepOrder())
    assert await tokens_of(engine)
    await engine.close()


async def test_idle_sleep_that_it_cannot_have_stops_the_start(folder: Path) -> None:
    with pytest.raises(EngineFailure, match=r"SLEEP_AFTER_IDLE_SECONDS=60 cannot be kept: .*enable_sleep"):
        await engine_of(folder, SleepConfig(idle_seconds=60)).start()


async def test_an_error_of_the_library_is_translated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, SleepConfig(), **ABLE)
    await engine.start()
    assert isinstance(engine.inner, TrtllmEngine)

    def fail(*_: Any) -> None:
        raise ValueError("out of memory")

    await engine.sleep(SleepOrder())
    with monkeypatch.context() as patch:
        patch.setattr(engine.inner.llm, "_collective_rpc", fail)
        with pytest.raises(EngineFailure, match="wakeup failed: ValueError: out of memory"):
            await engine.wake_up()
    await engine.wake_up()
    assert await tokens_of(engine)
    await engine.close()
