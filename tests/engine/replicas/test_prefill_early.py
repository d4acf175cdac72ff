"""Early handoffs on their way to the local engine: whatever becomes of them, each token is said once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.base import DeltaStream
from engine.config import FakeConfig
from engine.errors import EngineDied, EngineFailure, EngineUnavailable, InvalidRequest
from engine.fake.engine import FakeEngine
from engine.kit import handoff
from engine.kit.handoff import handoff_of
from engine.replicas import ask as client
from engine.replicas.ask import RemoteAnswer
from engine.replicas.prefill_engine import DisaggregatedEngine
from engine.replicas.prefill_pool import Announce, PrefillPool
from engine.types import Delta, GenerateRequest, Handoff, Held, NextHandoff
from protocol.frames import frame
from protocol.internal import PrefillInfo
from tests.support.disaggregated import (
    CHUNKED,
    PROMPT,
    Seen,
    all_of,
    bare_peer,
    decode_engine,
    nothing,
    pair,
    prefill_replica,
    replica_at,
    request,
    stats_with,
    tokens_of,
)


def early(computed: int = 0, state: bytes = b"somewhere") -> Handoff:
    return handoff_of("fake", Delta((), held=Held(state, computed=computed)))


class Local(FakeEngine):
    """Says what the test says, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(FakeConfig())
        self.requests: list[GenerateRequest] = []
        self.streams: list[DeltaStream] = []
        self.aborted: list[str] = []
        self.following: list[NextHandoff] = []
        self.takes = True

    def generate(self, request: GenerateRequest) -> DeltaStream:
        self.requests.append(request)
        self.streams.append(DeltaStream(lambda: self.aborted.append(request.request_id)))
        return self.streams[-1]

    async def continue_handoff(self, following: NextHandoff) -> bool:
        self.following.append(following)
        return self.takes


class Lease(RemoteAnswer[Handoff]):
    def __init__(self, first: Delta) -> None:
        self.handoff = handoff_of("fake", first)
        self.over = asyncio.Event()

    async def ended(self) -> None:
        await self.over.wait()

    def close(self) -> None:
        self.over.set()


class Pool(PrefillPool):
    """Announces what the test says before it hands over."""

    def __init__(self, announcing: Callable[[Announce], Awaitable[Any]], first: Delta) -> None:
        super().__init__([], "", 1, Seen())
        self._announcing = announcing
        self.lease = Lease(first)

    async def prefill(self, request: GenerateRequest, mine: PrefillInfo, announce: Announce) -> RemoteAnswer[Handoff]:
        await self._announcing(announce)
        return self.lease


FIRST = Delta((1,), held=Held(b"somewhere"))


@asynccontextmanager
async def serving(
    announcing: Callable[[Announce], Awaitable[Any]], first: Delta = FIRST
) -> AsyncIterator[tuple[Local, DeltaStream]]:
    local = Local()
    engine = DisaggregatedEngine(local, Pool(announcing, first), "fake", 0, Seen())
    await engine.start()
    try:
        yield local, engine.generate(request())
    finally:
        await engine.close()


async def said_with(stream: DeltaStream, local: Local) -> list[int]:
    """The tokens of a stream whose local engine adds two."""
    said = [*(await anext(stream)).token_ids]
    for _ in range(20):
        await asyncio.sleep(0)
    local.streams[-1].put(Delta((2,)))
    local.streams[-1].put(Delta((3,), finish_reason="length"))
    return said + tokens_of([delta async for delta in stream])


async def test_the_local_engine_learns_of_progress_and_of_the_first_token() -> None:
    async def announcing(announce: Announce) -> None:
        for computed in (0, 32, 64):
            await announce(early(computed))

    async with serving(announcing) as (local, stream):
        assert await said_with(stream, local) == [1, 2, 3]
        assert [one.handoff for one in local.requests] == [early(0)]
        assert [one.handoff for one in local.following] == [early(32), early(64), handoff_of("fake", FIRST)]
        assert {one.request_id for one in local.following} == {local.requests[0].request_id} and not local.aborted


@pytest.mark.parametrize(
    "error", [EngineUnavailable("lost"), EngineDied("died"), EngineFailure("broken"), InvalidRequest("no", "guide")]
)
async def test_an_early_failure_is_not_the_end(error: Exception) -> None:
    async def announcing(announce: Announce) -> None:
        await announce(early())
        local.streams[0].fail(error)
        await announce(early(32))

    async with serving(announcing) as (local, stream):
        assert await said_with(stream, local) == [1, 2, 3]
        assert [one.handoff for one in local.requests] == [early(0), handoff_of("fake", FIRST)]
        assert len({one.request_id for one in local.requests}) == 2, "the engine may not have ended the first"


async def test_an_engine_that_does_not_know_the_request_begins_it() -> None:
    async def announcing(announce: Announce) -> None:
        local.takes = False
        await announce(early())

    async with serving(announcing) as (local, stream):
        assert await said_with(stream, local) == [1, 2, 3]
        assert [one.handoff for one in local.requests] == [early(0), handoff_of("fake", FIRST)]
        assert local.aborted == [local.requests[0].request_id]


async def test_what_is_taken_back_ends_and_begins_anew() -> None:
    async def announcing(announce: Announce) -> None:
        await announce(early(64))
        await announce(None)
        await announce(early(0, b"elsewhere"))

    async with serving(announcing, Delta((1,), held=Held(b"elsewhere"))) as (local, stream):
        assert await said_with(stream, local) == [1, 2, 3]
        assert [one.handoff for one in local.requests] == [early(64), early(0, b"elsewhere")]
        assert local.aborted == [local.requests[0].request_id]


async def test_a_first_token_that_ends_the_answer_ends_the_reading() -> None:
    async with serving(lambda announce: announce(early()), Delta((1,), finish_reason="stop")) as (local, stream):
        assert tokens_of([delta async for delta in stream]) == [1]
        assert local.aborted == [local.requests[0].request_id]


@pytest.mark.parametrize("computed", [(0,), (0, 32)])
async def test_a_client_that_goes_ends_the_reading(computed: tuple[int, ...]) -> None:
    announced = asyncio.Event()

    async def announcing(announce: Announce) -> None:
        for each in computed:
            await announce(early(each))
        announced.set()
        await asyncio.Event().wait()

    async with serving(announcing) as (local, stream):
        await announced.wait()
        stream.close()
        assert local.aborted == [local.requests[0].request_id] and len(local.requests) == 1


async def test_blocks_are_announced_over_http_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    go_on = FakeEngine.continue_handoff

    async def noting(engine: FakeEngine, following: NextHandoff) -> bool:
        taken.append(await go_on(engine, following))
        return taken[-1]

    monkeypatch.setattr(FakeEngine, "continue_handoff", noting)
    async with pair() as (peer, engine, seen):
        assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
        assert taken == [True] and seen.outcomes == {"ok": 1} and not seen.local
        await stats_with(peer, nothing)
        await stats_with(engine, nothing)


@pytest.mark.parametrize("ends", [b"", b"0\r\n\r\n"], ids=["silent", "ended"])
async def test_a_replica_that_fails_after_an_announcement_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, ends: bytes
) -> None:
    """Blocks that were read early are dropped, and those of the next replica are read instead."""
    monkeypatch.setattr(client, "SILENCE_SECONDS", 1.0)
    payload = frame(handoff.encode(early()))
    after = CHUNKED + b"%x\r\n%b\r\n" % (len(payload), payload) + ends
    async with (
        bare_peer(after) as bad,
        prefill_replica() as (good, peer, _),
        decode_engine([bad, good]) as (engine, seen),
    ):
        replica_at(engine.pool, good).last_asked = 1  # so that the other one is asked first
        assert tokens_of(await all_of(engine, request())) == list(PROMPT[:12])
        assert seen.retries == 1 and seen.outcomes["ok"] == 1 and not seen.local
        await stats_with(peer, nothing)
        await stats_with(engine, nothing)
