"""Cancellation, ended leases, and lost engines: no token is repeated or lost, and no block stays held."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from engine.base import DeltaStream, Engine
from engine.errors import EngineNotReady, EngineUnavailable, InvalidRequest
from engine.fake.engine import FakeEngine
from engine.types import GenerateRequest
from routers.internal import leased
from tests.support.disaggregated import PROMPT, SOON, all_of, busy, nothing, pair, request, stats_with, tokens_of


async def cancel(engine: Engine, ready: Any) -> None:
    """Begin a request, and cancel it once `ready` has returned."""
    task = asyncio.create_task(all_of(engine, request(max_tokens=500)))
    await ready
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_cancelled_while_queued_at_prefill() -> None:
    async with pair({"max_batch_size": 1}) as (peer, engine, seen):
        blocking = peer.generate(replace(request(), prefill_only=True))
        await anext(blocking)

        async def queued() -> None:
            while not peer.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

        await cancel(engine, queued())
        async with asyncio.timeout(SOON):
            while peer.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert seen.outcomes == {"cancelled": 1}
        await blocking.aclose()
        await stats_with(peer, nothing, SOON)


async def test_cancelled_while_prefilling() -> None:
    async with pair({"fake_token_delay_ms": 60_000}) as (peer, engine, seen):
        stream = await busy(peer)
        task = asyncio.create_task(all_of(engine, request(max_tokens=500)))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait([task])
        await stats_with(peer, lambda stats: stats.num_aborted_requests == 1, SOON)
        assert seen.outcomes == {"cancelled": 1}
        await stream.aclose()


async def test_cancelled_while_the_blocks_are_read() -> None:
    async with pair(token_delay=60.0) as (peer, engine, _):
        stream = await busy(engine.inner)

        async def reading() -> None:
            while not engine.inner.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

        await cancel(engine, reading())
        await stats_with(peer, nothing, SOON)
        await stats_with(engine, lambda stats: stats.num_aborted_requests == 1, SOON)
        await stream.aclose()


async def test_cancelled_while_decoding() -> None:
    async with pair(token_delay=0.02) as (peer, engine, _):
        stream = engine.generate(request(max_tokens=5000))
        assert len(tokens_of([await anext(stream), await anext(stream)])) >= 2
        await stats_with(peer, nothing, SOON)
        await stream.aclose()
        await stats_with(engine, nothing, SOON)


async def test_a_lease_that_ends_early_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer ends first, and the blocks go a bit later; an engine that has not read them computes the prompt."""
    monkeypatch.setattr(leased, "GRACE_SECONDS", 0.4)
    async with pair({"lease_seconds": 0.3}, token_delay=1.0) as (peer, engine, seen):
        stream = await busy(engine.inner)
        task = asyncio.create_task(all_of(engine, request(max_tokens=4)))
        await stats_with(peer, lambda stats: stats.num_held_requests == 1)
        while not seen.local:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert not nothing(await stats_with(peer, lambda stats: True)), "the blocks outlive the answer"
        await stats_with(peer, nothing, 0.4 + SOON)
        assert not task.done()
        said = await task
        assert tokens_of(said) == list(PROMPT[:4]) and said[-1].finish_reason == "length"
        assert seen.local == {"lost": 1} and [delta.prompt is not None for delta in said].count(True) == 1
        await stream.aclose()
        await stats_with(engine, nothing, 2.0)


async def test_an_engine_lost_with_the_blocks_costs_no_token() -> None:
    async with pair(token_delay=0.5) as (peer, engine, seen):
        stream = await busy(engine.inner)
        task = asyncio.create_task(all_of(engine, request(max_tokens=4)))
        await stats_with(peer, lambda stats: stats.num_held_requests == 1)
        await peer.close()
        assert tokens_of(await task) == list(PROMPT[:4])
        assert seen.local == {"lost": 1}
        await stream.aclose()


class Picky(FakeEngine):
    """Cannot use what is handed over, nor go on without."""

    def generate(self, request: GenerateRequest) -> DeltaStream:
        if request.handoff is not None:
            return DeltaStream.failed(InvalidRequest("block sizes differ: 16 and 32", "handoff"))
        return super().generate(request)


async def test_an_engine_that_cannot_go_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.disaggregated.FakeEngine", Picky)
    async with pair() as (peer, engine, _):
        stream = engine.generate(request())
        assert (await anext(stream)).token_ids == (PROMPT[0],)
        with pytest.raises(EngineUnavailable, match="block sizes differ: 16 and 32"):
            await anext(stream)
        await stats_with(peer, nothing)


async def test_closing_ends_every_request_with_an_error() -> None:
    async with pair(token_delay=0.05) as (peer, engine, _):
        streams = [engine.generate(request(str(index), max_tokens=500)) for index in range(10)]
        assert (await anext(streams[0])).token_ids
        await engine.close()
        for stream in streams:
            with pytest.raises(EngineNotReady):
                _ = [delta async for delta in stream]
        await stats_with(peer, nothing, SOON)
        with pytest.raises(EngineNotReady):
            await all_of(engine, request())
