"""Conformance of every engine with handoffs: prefill, and decode that continues from it (`engine/base.py`)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from engine.base import DeltaStream, Engine
from engine.errors import InvalidRequest
from engine.kit import handoff
from engine.types import Delta, GenerateRequest, Handoff, NextHandoff, ReasoningBudget
from tests.support.engine_cases import (
    BLOCK,
    HANDING_OVER,
    REAL,
    config_of,
    engine_of,
    generate,
    idle,
    prompt_of,
    request_for,
    tokens_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[*HANDING_OVER, "trtllm-newest"])
async def engine(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Engine]:
    async with engine_of(request.param, config_of(request.param, tiny_model)) as engine:
        await engine.start()
        yield engine


async def prefill(engine: Engine, request: GenerateRequest) -> tuple[Handoff, DeltaStream]:
    """What is handed over, as it travels, and the open stream that it is valid with."""
    stream = engine.generate(replace(request, prefill_only=True, request_id=f"{request.request_id}-prefill"))
    return travelled(engine, await anext(stream)), stream


def travelled(engine: Engine, delta: Delta) -> Handoff:
    return handoff.decode_handoff(handoff.encode(handoff.handoff_of(engine.info.backend, delta)))


def decoding(request: GenerateRequest, handed: Handoff) -> GenerateRequest:
    """The request as the other side knows it: here both are one engine, and the prefill's is not over yet."""
    return replace(request, request_id=f"{request.request_id}-decode", handoff=handed)


async def both(engine: Engine, request: GenerateRequest) -> list[Delta]:
    """The deltas of prefill and decode."""
    handed, stream = await prefill(engine, request)
    rest = [] if handed.first.finish_reason is not None else await generate(engine, decoding(request, handed))
    await stream.aclose()
    return [handed.first, *rest]


SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 30},
    {"max_tokens": 2},
    {"max_tokens": BLOCK + 1, "logprobs": 2},
    {"max_tokens": 12, "temperature": 0.9, "seed": 5},
    {"max_tokens": 20, "min_tokens": 3, "repetition_penalty": 1.3},
    {"max_tokens": 12, "reasoning_budget": ReasoningBudget(3, (5, 6, 9), (7,), True, {1: {6: 0}})},
    {"max_tokens": 12, "reasoning_budget": ReasoningBudget(0, (5, 6, 9), (7,), True, {1: {6: 0}})},
]
IN_FULL = [(length, sampling) for sampling in SAMPLINGS for length in (5, BLOCK, 3 * BLOCK + 1)]
AT_ONCE = [(3 * BLOCK + 1, {"max_tokens": 20, "logprobs": 2, "temperature": 0.9, "seed": 5, "repetition_penalty": 1.3})]
"""What a wrapper passes on or loses, whatever its values: one request with most of it."""


@pytest.mark.parametrize(
    ("engine", "length", "sampling"),
    [
        pytest.param(kind, length, sampling, id=f"{kind}-{length}-{','.join(sampling)}")
        for kind in [*HANDING_OVER, "trtllm-newest"]
        for length, sampling in (IN_FULL if kind in REAL else AT_ONCE)
    ],
    indirect=["engine"],
    scope="module",
)
async def test_prefill_and_decode_give_what_one_engine_gives(
    engine: Engine, length: int, sampling: dict[str, Any]
) -> None:
    if engine.info.backend == "trtllm" and "logprobs" in sampling:  # not of logits that a processor changes
        sampling = {**sampling, "temperature": 0.0, "repetition_penalty": 1.0}
    request = request_for(prompt_of(length), **sampling)
    whole = await generate(engine, request)
    first, *rest = await both(engine, request)
    assert first.prompt is not None and first.finish_reason is None and len(first.token_ids) == 1
    assert rest and all(delta.prompt is None and delta.held is None for delta in rest)
    assert tokens_of([first, *rest]) == tokens_of(whole)
    assert (rest[-1].finish_reason, rest[-1].stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)
    entries = [[entry[0] for delta in deltas for entry in delta.logprobs] for deltas in ([first, *rest], whole)]
    assert [entry.token_id for entry in entries[0]] == [entry.token_id for entry in entries[1]]
    assert len(entries[1]) == (len(tokens_of(whole)) if "logprobs" in sampling else 0)


EARLY = [
    {"max_tokens": 12, "logprobs": 1},
    {"max_tokens": 12, "temperature": 0.9, "seed": 5, "repetition_penalty": 1.3},
]
LONG = 10 * BLOCK + 3
"""Tokens of a prompt that takes several steps."""


@pytest.mark.parametrize("sampling", EARLY, ids=lambda sampling: ",".join(sampling))
async def test_a_handoff_may_begin_before_the_first_token(engine: Engine, sampling: dict[str, Any]) -> None:
    request = request_for(prompt_of(LONG), **sampling)
    stream = engine.generate(
        replace(request, prefill_only=True, early_handoff=True, request_id=f"{request.request_id}-prefill")
    )
    local: DeltaStream | None = None
    early = 0
    while (handed := travelled(engine, await anext(stream))).early:
        early += 1
        assert handed.state and 0 <= handed.computed <= LONG
        if local is None:
            local = engine.generate(decoding(request, handed))
        else:
            assert await engine.continue_handoff(NextHandoff(f"{request.request_id}-decode", handed))
    assert engine.info.backend != "trtllm" or not early, "it has no early handoffs"
    if local is None:  # a consumer that is late gets the early ones and the last in one
        local = engine.generate(decoding(request, handed))
    else:
        assert await engine.continue_handoff(NextHandoff(f"{request.request_id}-decode", handed))
    rest = [delta async for delta in local]
    await stream.aclose()
    whole = await generate(engine, request)
    assert tokens_of([handed.first, *rest]) == tokens_of(whole) and handed.first.prompt is not None
    assert [entry[0].token_id for delta in rest for entry in delta.logprobs] == (
        tokens_of(whole)[1:] if "logprobs" in sampling else []
    )
    await idle(engine)


async def test_an_early_handoff_leaves_nothing_when_both_sides_give_up(engine: Engine) -> None:
    request = request_for(prompt_of(LONG))
    stream = engine.generate(
        replace(request, prefill_only=True, early_handoff=True, request_id=f"{request.request_id}-prefill")
    )
    handed = travelled(engine, await anext(stream))
    local = engine.generate(decoding(request, handed))
    await asyncio.sleep(0.05)
    await stream.aclose()
    await local.aclose()
    assert not await engine.continue_handoff(NextHandoff("unknown", handed))
    await idle(engine)


async def test_blocks_are_held_until_the_stream_is_closed(engine: Engine) -> None:
    before = await idle(engine)
    handed, stream = await prefill(engine, request_for(prompt_of(3 * BLOCK + 1)))
    assert handed.state and handed.first.finish_reason is None
    waiting = asyncio.ensure_future(anext(stream))
    _, pending = await asyncio.wait([waiting], timeout=0.3)
    assert pending, "the stream stays open"
    if engine.info.backend != "trtllm":  # which frees them itself, and says nothing of them
        assert await used(engine) >= 4
    await stream.aclose()
    await asyncio.wait([waiting])
    await idle(engine, before if engine.info.backend != "trtllm" else None)


async def test_a_prefill_that_is_cancelled_holds_nothing(engine: Engine) -> None:
    requests = [replace(request_for(prompt_of(40)), prefill_only=True) for _ in range(20)]
    tasks = [asyncio.create_task(generate(engine, request)) for request in requests]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await idle(engine)


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"max_tokens": 0, "prompt_logprobs": 0}])
async def test_what_ends_with_the_prompt_leaves_nothing_to_decode(engine: Engine, sampling: dict[str, Any]) -> None:
    if not engine.info.prompt_logprobs:
        sampling = {"max_tokens": sampling["max_tokens"]}
    request = request_for(prompt_of(20), **sampling)
    (whole,) = await generate(engine, request)
    handed, stream = await prefill(engine, request)
    assert handed.state == b"" and (handed.first.token_ids, handed.first.finish_reason) == (whole.token_ids, "length")
    assert handed.first.prompt is not None and whole.prompt is not None
    assert (handed.first.prompt.logprobs is None) == (whole.prompt.logprobs is None)
    assert [delta async for delta in stream] == []
    await idle(engine)


async def test_an_end_at_the_first_token_leaves_nothing_to_decode(engine: Engine) -> None:
    prompt = prompt_of(20)
    stop = tokens_of(await generate(engine, request_for(prompt, max_tokens=1)))[0]
    handed, _ = await prefill(engine, request_for(prompt, stop_token_ids=(stop,)))
    assert (handed.first.token_ids, handed.first.finish_reason, handed.first.stop_reason) == ((stop,), "stop", stop)
    assert handed.state == b""


async def test_decoding_that_is_cancelled_frees_both_sides(engine: Engine) -> None:
    request = request_for(prompt_of(40), max_tokens=400)
    handed, stream = await prefill(engine, request)
    stream_of_decode = engine.generate(decoding(request, handed))
    await anext(stream_of_decode)
    await stream_of_decode.aclose()
    await stream.aclose()
    await idle(engine)


async def test_a_handoff_of_another_kind_of_engine_is_refused(engine: Engine) -> None:
    request = request_for(prompt_of(20))
    handed, stream = await prefill(engine, request)
    for wrong, message in ((replace(handed, backend="other"), "other"), (replace(handed, state=b"\xc1"), "handoff")):
        with pytest.raises(InvalidRequest, match=message) as caught:
            await generate(engine, decoding(request, wrong))
        assert caught.value.param == "handoff"
    await stream.aclose()
    await idle(engine)


async def test_without_the_blocks_the_prompt_is_computed_again(engine: Engine) -> None:
    request = request_for(prompt_of(2 * BLOCK + 3), max_tokens=20)
    handed, stream = await prefill(engine, request)
    await stream.aclose()
    rest = await generate(engine, decoding(request, replace(handed, state=b"")))
    assert tokens_of([handed.first, *rest]) == tokens_of(await generate(engine, request))
    assert all(delta.prompt is None for delta in rest)


async def used(engine: Engine) -> int:
    """Blocks in use, in statistics that say of something held."""
    async with asyncio.timeout(20):
        async for stats in engine.stats():
            if stats.num_held_requests:
                return stats.kv_cache_stats.used_num_blocks
    raise AssertionError("the statistics have ended")
