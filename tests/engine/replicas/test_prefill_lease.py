"""The end of a lease and the local engine's first delta may come in any order: no token is repeated or lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.base import DeltaStream
from engine.config import FakeConfig
from engine.errors import EngineUnavailable, QueueFull
from engine.fake.engine import FakeEngine
from engine.kit.handoff import handoff_of
from engine.replicas.ask import RemoteAnswer
from engine.replicas.prefill_engine import DisaggregatedEngine
from engine.replicas.prefill_pool import Announce, PrefillPool
from engine.types import Delta, FinishReason, GenerateRequest, Held
from protocol.internal import PrefillInfo
from tests.support.disaggregated import PROMPT, Seen, all_of, nothing, pair, request, stats_with, tokens_of


class Scripted(FakeEngine):
    """Says what the test says."""

    def __init__(self) -> None:
        super().__init__(FakeConfig())
        self.streams: list[DeltaStream] = []
        self.aborted: list[int] = []

    def generate(self, request: GenerateRequest) -> DeltaStream:
        index = len(self.streams)
        self.streams.append(DeltaStream(lambda: self.aborted.append(index)))
        return self.streams[index]


class ScriptedLease(RemoteAnswer):
    """Over when the test says so."""

    def __init__(self) -> None:
        self.handoff = handoff_of("fake", Delta((1,), held=Held(b"somewhere")))
        self.over = asyncio.Event()
        self.closed = False

    async def ended(self) -> None:
        await self.over.wait()

    def close(self) -> None:
        self.closed = True


class ScriptedPool(PrefillPool):
    def __init__(self, lease: RemoteAnswer) -> None:
        super().__init__([], "", 1, Seen())
        self._lease = lease

    async def prefill(self, request: GenerateRequest, mine: PrefillInfo, announce: Announce) -> RemoteAnswer:
        return self._lease


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[DisaggregatedEngine, Scripted, ScriptedLease]]:
    local, lease = Scripted(), ScriptedLease()
    engine = DisaggregatedEngine(local, ScriptedPool(lease), "fake", 0, Seen())
    await engine.start()
    try:
        yield engine, local, lease
    finally:
        await engine.close()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("finish", [None, "length"])
@pytest.mark.parametrize("between", range(12))
async def test_whichever_comes_first_each_token_is_said_once(between: int, finish: FinishReason | None) -> None:
    async with scripted() as (engine, local, lease):
        stream = engine.generate(request())
        assert (await anext(stream)).token_ids == (1,)
        lease.over.set()
        await turns(between)
        local.streams[0].put(Delta((2,), finish_reason=finish))
        await turns(20)
        if len(local.streams) == 2:
            assert local.aborted == [0]
            local.streams[1].put(Delta((2,), finish_reason=finish))
        local.streams[-1].put(Delta((3,), finish_reason="length"))
        assert tokens_of([delta async for delta in stream]) == ([2, 3] if finish is None else [2])


@pytest.mark.parametrize("first", ["lease", "delta"])
@pytest.mark.parametrize("between", range(12))
async def test_whenever_the_client_goes_nothing_runs_on(between: int, first: str) -> None:
    async with scripted() as (engine, local, lease):
        stream = engine.generate(request())
        await anext(stream)
        if first == "lease":
            lease.over.set()
        else:
            local.streams[0].put(Delta((2,)))
        await turns(between)
        stream.close()
        await turns(20)
        assert local.aborted == list(range(len(local.streams))) and lease.closed


@pytest.mark.parametrize("between", range(6))
async def test_nothing_runs_on_when_the_client_goes_as_the_prompt_is_handed_over(between: int) -> None:
    async with scripted() as (engine, local, _):
        stream = engine.generate(request())
        await turns(between)
        stream.close()
        await turns(20)
        assert local.aborted == list(range(len(local.streams)))


class Unlike(FakeEngine):
    """Has other KV blocks than whoever hands over."""

    def generate(self, request: GenerateRequest) -> DeltaStream:
        if request.handoff is not None and request.handoff.state:
            return DeltaStream.failed(EngineUnavailable("KV blocks do not fit: 16 layers here, 32 there"))
        return super().generate(request)


async def test_blocks_that_do_not_fit_are_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.disaggregated.FakeEngine", Unlike)
    async with pair() as (peer, engine, seen):
        assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
        assert seen.local == {"lost": 1}
        await stats_with(peer, nothing)


class Full(FakeEngine):
    def generate(self, request: GenerateRequest) -> DeltaStream:
        return DeltaStream.failed(QueueFull("everybody is here"))


@pytest.mark.parametrize("min_tokens", [0, 1000])
async def test_an_engine_without_room_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch, min_tokens: int) -> None:
    monkeypatch.setattr("tests.support.disaggregated.FakeEngine", Full)
    async with pair(min_tokens=min_tokens) as (_, engine, seen):
        with pytest.raises(QueueFull):
            await all_of(engine, request())
        assert not seen.local["lost"]
