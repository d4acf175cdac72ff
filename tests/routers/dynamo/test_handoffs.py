"""Handoffs that a frontend carries, and the leases of their KV blocks, without Dynamo: calls are stand-ins here."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from engine.config import FakeConfig
from engine.errors import EngineUnavailable, InvalidRequest
from engine.fake.engine import FakeEngine
from engine.kit.handoff import handoff_of, prefill_info
from engine.replicas.prefill_engine import DisaggregatedEngine
from engine.types import Delta, GenerateRequest
from routers.dynamo import handoffs
from routers.dynamo.handoffs import FIELD, DynamoPrefills, HeldBlocks, Ticket, packed, unpacked
from tests.support.disaggregated import Seen, aggregated, all_of, at_the_end, request, tokens_of
from tests.support.waiting import slowness, until


class StandInContext:
    """What our code uses of Dynamo's `Context`."""

    def __init__(self) -> None:
        self.stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def stop_generating(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(True)

    def async_killed_or_stopped(self) -> "asyncio.Future[bool]":
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.stopped.add_done_callback(lambda _: waiter.done() or waiter.set_result(True))
        if self.stopped.done():
            waiter.set_result(True)
        return waiter


class Pair:
    """A prefill worker's engine and a decode worker's, and the calls between them."""

    def __init__(self, lease_seconds: float) -> None:
        self.prefill = FakeEngine(FakeConfig())
        self.holding = 0
        self.held = HeldBlocks(lease_seconds, self._count)
        self.calls = 0
        self.reachable = True
        self.found = True
        self.seen = Seen()
        source = DynamoPrefills(self._call, StandInContext)  # type: ignore[arg-type]
        self.decode = DisaggregatedEngine(FakeEngine(FakeConfig()), source, "m", 0, self.seen)

    def _count(self, more: int) -> None:
        self.holding += more

    async def _call(self, ticket: Ticket, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        if not self.reachable:
            raise ConnectionError("no such instance")
        if not self.found:
            await asyncio.Event().wait()
        items: AsyncGenerator[Any, None] = self.held.claim(ticket.lease, context)
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()

    async def hand_over(self, wanted: GenerateRequest) -> dict[str, Any]:
        """Prefill as a worker does, and return the `disaggregated_params`."""
        stream = self.prefill.generate(replace(wanted, prefill_only=True))
        delta = await anext(stream)
        kept = self.held.keep(stream) if delta.held is not None else ""
        info = self.prefill.info
        ticket = Ticket(info=prefill_info("m", info), endpoint="ns.prefill.lease", instance=42, lease=kept)
        return packed([(handoff_of(info.backend, delta), ticket)], 0)

    async def go_on(self, wanted: GenerateRequest, params: dict[str, Any]) -> list[Delta]:
        return await all_of(self.decode, replace(wanted, handoff=unpacked(params)[0]))


@asynccontextmanager
async def pair(lease_seconds: float = 20.0) -> AsyncIterator[Pair]:
    made = Pair(lease_seconds)
    await asyncio.gather(made.prefill.start(), made.decode.start())
    try:
        yield made
    finally:
        await made.decode.close()
        made.held.close()
        await made.prefill.close()
        assert made.holding == 0


async def test_a_prompt_is_handed_over_and_its_blocks_are_freed() -> None:
    async with pair() as workers:
        params = await workers.hand_over(request())
        assert params["worker_id"] == {"prefill_worker_id": 42, "prefill_dp_rank": 0}
        assert workers.holding == 1
        deltas = await workers.go_on(request(), params)
        assert tokens_of(deltas) == tokens_of(await aggregated(request()))
        await until(lambda: workers.holding == 0)
        assert (workers.calls, workers.seen.local.total()) == (1, 0)


async def test_a_sequence_of_one_token_ends_with_the_first() -> None:
    """Prefill does not know how long the output may be."""
    async with pair() as workers:
        params = await workers.hand_over(request())
        deltas = await workers.go_on(request(max_tokens=1), params)
        assert [(len(delta.token_ids), delta.finish_reason) for delta in deltas] == [(1, "length")]
        await until(lambda: workers.holding == 0)


async def test_blocks_are_read_only_under_a_lease() -> None:
    """Blocks that are no longer held may be those of another prompt by now: the prompt is computed here."""
    async with pair() as workers:
        params = await workers.hand_over(request())
        workers.reachable = False
        deltas = await workers.go_on(request(), params)
        assert tokens_of(deltas) == tokens_of(await aggregated(request()))
        assert workers.seen.local == {"no_peer": 1}


async def test_a_worker_that_has_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoffs, "_CLAIM_SECONDS", 0.01)
    async with pair() as workers:
        params = await workers.hand_over(request())
        workers.found = False
        async with asyncio.timeout(10 * slowness()):
            deltas = await workers.go_on(request(), params)
        assert tokens_of(deltas) == tokens_of(await aggregated(request()))
        assert workers.seen.local == {"no_peer": 1}


async def test_blocks_that_nobody_claims_are_freed() -> None:
    async with pair(lease_seconds=0.01) as workers:
        params = await workers.hand_over(request())
        await until(lambda: workers.holding == 0)
        deltas = await workers.go_on(request(), params)
        assert tokens_of(deltas) == tokens_of(await aggregated(request()))
        assert workers.seen.local == {"no_peer": 1}


async def test_a_lease_is_claimed_once() -> None:
    async with pair() as workers:
        params = await workers.hand_over(request())
        assert len(unpacked(params)) == 1
        context = StandInContext()
        lease = next(iter(workers.held._unclaimed))
        claim = workers.held.claim(lease, context)  # type: ignore[arg-type]
        assert await anext(claim) == {"held": True}
        with pytest.raises(InvalidRequest, match="nothing is held"):
            await anext(workers.held.claim(lease, context))  # type: ignore[arg-type]
        context.stop_generating()
        assert [item async for item in claim] == []
        await until(lambda: workers.holding == 0)


async def test_a_request_without_a_handoff_is_computed_here() -> None:
    async with pair() as workers:
        assert tokens_of(await all_of(workers.decode, request())) == tokens_of(await aggregated(request()))
        assert workers.seen.local == {"no_peer": 1}


async def test_a_worker_that_differs_is_not_believed() -> None:
    async with pair() as workers:
        params = await workers.hand_over(request())
        source = workers.decode.pool
        (handoff,) = unpacked(params)
        mine = replace(workers.decode.common, block_size=99)
        with pytest.raises(EngineUnavailable, match="block_size"):
            await source.prefill(replace(request(), handoff=handoff), mine, at_the_end)
        workers.held.close()


@pytest.mark.parametrize("value", ["%%%", ["%%%"], ["AAAA"], [5], 5])
def test_malformed_handoffs_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="handoff"):
        unpacked({FIELD: value})


def test_the_params_of_other_engines_have_no_handoff() -> None:
    assert unpacked({"kv_transfer_params": {}}) == []
