"""Handoffs between two embedded engines, in one process and in two: guides, logits processors, shared memory, and
leftovers.
"""

import asyncio
import contextlib
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from engine.base import DeltaStream, Engine
from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.errors import EngineDied, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.kit import handoff
from engine.kit.logits import unregister
from engine.kit.processors import ProcessorConfig
from engine.stats import IterationStats
from engine.types import Delta, GenerateRequest, Guide, Handoff, Held
from tests.support.engine_cases import (
    BLOCK,
    EMBEDDED,
    engine_of,
    generate,
    idle,
    prompt_of,
    request_for,
    rounded,
    tokens_of,
)
from tests.support.grammar import tokenizer_folder  # noqa: F401 - a fixture
from tests.support.waiting import slowness

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = 2
FORCED = ProcessorConfig("spells", "forced_sequence", {"token_ids": [9, 7, 7, 30], "eos_token_id": EOS})
Two = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The tiny model with a tokenizer, which guides need."""
    folder = tmp_path_factory.mktemp("with_tokenizer") / "model"
    shutil.copytree(tiny_model, folder)
    shutil.copy(tokenizer_folder / "tokenizer.json", folder)
    return folder


def config_of(folder: Path, **options: Any) -> EmbeddedConfig:
    return EmbeddedConfig(model=str(folder), **{**EMBEDDED, "kv_transfer": "auto", "processors": (FORCED,), **options})


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "embedded-host"])
async def two(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Two]:
    """A prefill and a decode engine: by TCP in one process, by shared memory in two."""
    async with AsyncExitStack() as stack:
        options = {"kv_transfer": "shared_memory"} if request.param == "embedded-host" else {}
        model = rounded(folder) if request.param == "embedded-host" else folder
        prefill, decode = [
            await stack.enter_async_context(engine_of(request.param, config_of(model, **options))) for _ in range(2)
        ]
        await asyncio.gather(prefill.start(), decode.start())
        yield prefill, decode
        await idle(decode)
        assert (await idle(prefill)).num_held_requests == 0
    with contextlib.suppress(KeyError):
        unregister("spells")


async def prefill(engine: Engine, request: GenerateRequest) -> tuple[Handoff, DeltaStream]:
    stream = engine.generate(replace(request, prefill_only=True))
    return handoff.decode_handoff(handoff.encode(handoff.handoff_of("embedded", await anext(stream)))), stream


async def after_transfers(engine: Engine, total: int) -> IterationStats:
    """The statistics of an idle engine that has read KV blocks `total` times; older ones may come late."""
    async with asyncio.timeout(20):
        async for stats in engine.stats():
            if stats.kv_transfer_success_total >= total and not stats.num_active_requests:
                return stats
    raise AssertionError("the statistics have ended")


async def both(two: Two, request: GenerateRequest) -> list[Delta]:
    handed, stream = await prefill(two[0], request)
    async with aclosing(stream):
        rest = [] if handed.first.finish_reason else await generate(two[1], replace(request, handoff=handed))
    return [handed.first, *rest]


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.mark.parametrize(
    "sampling",
    [
        {"guide": Guide("json_schema", SCHEMA)},
        {"guide": Guide("regex", "[ab]{3}c*"), "temperature": 1.0, "seed": 4},
        {"guide": Guide("choice", '["yes", "no"]'), "frequency_penalty": 1.0},
        {"processors": ("spells",), "ignore_eos": False},
        {"processors": ("spells",), "max_tokens": 3, "logprobs": 1},
        {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.2},
    ],
    ids=lambda sampling: ",".join(sampling),
)
async def test_sampling_parameters_apply_on_both_sides(two: Two, sampling: dict[str, Any]) -> None:
    request = request_for(prompt_of(3 * BLOCK + 5), **{"max_tokens": 20, **sampling})
    whole = await generate(two[0], replace(request, request_id="whole"))
    before = await idle(two[1])
    parts = await both(two, request)
    total = before.kv_transfer_success_total + 1
    assert (await after_transfers(two[1], total)).kv_transfer_success_total == total
    assert len(tokens_of(parts)) > 1 and tokens_of(parts) == tokens_of(whole)
    assert parts[-1].finish_reason == whole[-1].finish_reason


async def test_many_at_once_are_what_each_is_alone(two: Two) -> None:
    shared = prompt_of(3 * BLOCK)
    prompts = [(shared if index % 2 else ()) + prompt_of(5 + index * 7) for index in range(24)]
    requests = [request_for(prompt, max_tokens=25) for prompt in prompts]
    before = await idle(two[1])
    together = await asyncio.gather(*(both(two, request) for request in requests))
    after = await after_transfers(two[1], before.kv_transfer_success_total + 24)
    assert after.kv_transfer_success_total == before.kv_transfer_success_total + 24
    assert (
        after.kv_transfer_bytes > before.kv_transfer_bytes
        and after.kv_transfer_latency_seconds > before.kv_transfer_latency_seconds
    )
    whole = await asyncio.gather(
        *(generate(two[0], replace(request, request_id=f"{request.request_id}-whole")) for request in requests)
    )
    assert [tokens_of(deltas) for deltas in together] == [tokens_of(deltas) for deltas in whole]


async def test_a_first_token_against_the_guide_is_refused(two: Two) -> None:
    request = request_for(prompt_of(20), guide=Guide("choice", '["yes", "no"]'))
    handed, stream = await prefill(two[0], request)
    wrong = replace(handed, first=replace(handed.first, token_ids=(5,)))
    with pytest.raises(InvalidRequest, match="not one that the guide allows"):
        await generate(two[1], replace(request, handoff=wrong))
    await stream.aclose()


async def test_prefill_and_handoff_exclude_each_other(two: Two) -> None:
    request = request_for(prompt_of(20))
    handed, stream = await prefill(two[0], request)
    with pytest.raises(InvalidRequest, match="computed already"):
        await generate(two[1], replace(request, handoff=handed, prefill_only=True))
    await stream.aclose()


async def test_aborts_of_a_crowd_leave_nothing(two: Two) -> None:
    """In any order of aborts: blocks of a prefill engine may be freed while they are read."""

    async def cut(index: int) -> None:
        async with asyncio.timeout(0.005 * index):
            await both(two, request_for(prompt_of(100 + index), max_tokens=200))

    results = await asyncio.gather(*(cut(index) for index in range(30)), return_exceptions=True)
    assert sum(isinstance(result, TimeoutError) for result in results) > 5
    await idle(two[1])
    assert (await idle(two[0])).num_held_requests == 0


async def test_without_transfers_nothing_is_handed_over(tiny_model: Path) -> None:
    async with engine_of("embedded", config_of(tiny_model, kv_transfer="", processors=())) as engine:
        await engine.start()
        request = request_for(prompt_of(20))
        first, *_ = await generate(engine, request_for(request.prompt_token_ids, max_tokens=1))
        handed = handoff.handoff_of("embedded", replace(first, finish_reason=None, held=Held(b"x")))
        with pytest.raises(EngineUnavailable, match="kv_transfer is empty"):
            await generate(engine, replace(request, prefill_only=True))
        with pytest.raises(InvalidRequest, match="kv_transfer is empty"):
            await generate(engine, replace(request, handoff=handed))
        rest = await generate(engine, replace(request, handoff=replace(handed, state=b"")))
        assert [*first.token_ids, *tokens_of(rest)] == tokens_of(await generate(engine, request))


async def test_held_blocks_cost_no_processor_time_and_are_freed_at_close(tiny_model: Path) -> None:
    async with engine_of(
        "embedded", config_of(tiny_model, num_blocks=8, max_seq_len=8 * BLOCK, processors=())
    ) as engine:
        await engine.start()
        _, stream = await prefill(engine, request_for(prompt_of(6 * BLOCK)))
        waiting = asyncio.ensure_future(prefill(engine, request_for(prompt_of(5 * BLOCK))))
        await asyncio.sleep(0.1)
        before = time.process_time()
        await asyncio.sleep(0.4)
        assert time.process_time() - before < 0.1 * slowness() and not waiting.done()
        await stream.aclose()
        _, held = await asyncio.wait_for(waiting, 20)
        await engine.close()
        with pytest.raises(EngineNotReady):
            await anext(held)


async def test_an_engine_that_died_moves_no_bytes(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is freed when its thread ends. It takes no request while its transfers close, which may take long."""
    healthy: list[bool] = []
    close = EngineCore.close

    def fail(_: EngineCore) -> None:
        raise AssertionError("a bug")

    def closing(core: EngineCore) -> None:
        healthy.append(engine.healthy)
        close(core)

    before = set(threading.enumerate())
    async with engine_of("embedded", config_of(tiny_model, kv_transfer="tcp", processors=())) as engine:
        await engine.start()
        assert "transfer-listener" in {thread.name for thread in set(threading.enumerate()) - before}
        monkeypatch.setattr(EngineCore, "step", fail)
        monkeypatch.setattr(EngineCore, "close", closing)
        with pytest.raises(EngineDied):
            await generate(engine, request_for(prompt_of(20)))
        assert healthy == [False]
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert not {name for name in left if name.startswith("transfer")}


async def test_engine_info_describes_the_layout_and_capacity_of_blocks(tiny_model: Path) -> None:
    infos = []
    for options in ({}, {}, {"num_blocks": 4}, {"kv_block_size": 2 * BLOCK}):
        async with engine_of("embedded", config_of(tiny_model, processors=(), **options)) as engine:
            await engine.start()
            infos.append(engine.info)
    same, again, small, other = (info.kv_layout for info in infos)
    assert same == again == small != other and "\n" not in same
    assert f", blocks of {BLOCK} tokens, windows full" in same and ", float32, " in same
    assert other == same.replace(f"blocks of {BLOCK} tokens", f"blocks of {2 * BLOCK} tokens")
    assert [info.capacity for info in infos] == [0, 0, 4 * BLOCK, 0]
