"""Dynamo's own consumers understand our messages, and know after thousands of requests exactly what the engine has."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import engine.embedded.engine as embedded_engine
from engine.config import EmbeddedConfig, FakeConfig
from engine.create import create_engine
from engine.embedded.core import EngineCore
from engine.embedded.kv.blocks import event_hash
from engine.fake.engine import FakeEngine
from engine.replicas.publisher.messages import signed
from engine.replicas.publisher.publisher import Publisher
from tests.support.publisher import Books, DynamoTree, Follower, followers, generate, image, publishing

pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed (constraints-dev.txt, Linux)")

SIZE = 4
SALTS = ("", "", "a", "b")


def prompts(draw: random.Random, count: int, longest: int) -> list[tuple[str, list[int]]]:
    """Prompts that share prefixes, some under a salt of their own."""
    stems = [[draw.randrange(3, 300) for _ in range(longest // 2)] for _ in range(8)]
    return [
        (
            draw.choice(SALTS),
            [
                *draw.choice(stems)[: draw.randrange(longest // 2)],
                *(draw.randrange(3, 6) for _ in range(draw.randrange(1, longest // 2))),
            ],
        )
        for _ in range(count)
    ]


class Consumers:
    """What a router makes of a replica's messages."""

    def __init__(self, publisher: Publisher, follower: Follower) -> None:
        self.books, self.tree = Books(), DynamoTree(SIZE)
        self._publisher, self._follower, self._applied = publisher, follower, 0

    async def update(self) -> None:
        """Take what has been published, once the engine has said all of it."""
        before = -1
        while before != (before := self._publisher.ranks[0].messages):  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.005)
        await self._follower.catch_up(self._applied)
        for event in self._follower.events_from(self._applied):
            self.books.apply(event)
            self.tree.apply(event)
        self._applied = len(self._follower.payloads)


@asynccontextmanager
async def consuming(engine: Any) -> AsyncIterator[Consumers]:
    await engine.start()
    async with publishing(engine, buffer=100_000) as publisher, followers(publisher) as (follower,):
        yield Consumers(publisher, follower)
        assert publisher.failure is None
        assert publisher.ranks[0].converter.lost == 0
    await engine.close()


async def run_all(engine: Any, requests: Sequence[tuple[str, list[int]]], at_once: int) -> None:
    for start in range(0, len(requests), at_once):
        batch = enumerate(requests[start : start + at_once])
        await asyncio.gather(
            *(generate(engine, f"r{start + i}", tokens, 1 + i % 9, salt) for i, (salt, tokens) in batch)
        )


async def check(
    engine: Any, consumers: Consumers, requests: Sequence[tuple[str, list[int]]], books: Callable[[], set[int]]
) -> int:
    """Check that the hashes are the engine's, and that the tree foretells how much of each prompt the engine has.

    Return the sum of that, in blocks.
    """
    await consumers.update()
    assert consumers.books.hashes == {signed(value) for value in books()}
    found = 0
    for number, (salt, tokens) in enumerate(requests):
        foretold = min(consumers.tree.blocks_of(tokens, salt), (len(tokens) - 1) // SIZE)
        assert await generate(engine, f"c{number}", tokens, 1, salt) == foretold * SIZE
        found += foretold
        await consumers.update()
    async with publishing(engine, buffer=100_000) as publisher, followers(publisher) as (follower,):
        late = Consumers(publisher, follower)
        while not publisher.ranks[0].messages:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.005)
        await late.update()
        assert late.books.hashes == consumers.books.hashes, "a publisher that begins now tells of all that there is"
        assert [late.tree.blocks_of(tokens, salt) for salt, tokens in requests] == [
            consumers.tree.blocks_of(tokens, salt) for salt, tokens in requests
        ]
    return found


@pytest.mark.slow
async def test_10000_random_requests_on_the_fake_engine() -> None:
    engine = FakeEngine(FakeConfig(num_blocks=80, block_size=SIZE, context_length=64, max_num_seqs=10))
    requests = prompts(random.Random(0), 10_000, 36)
    async with consuming(engine) as consumers:
        await run_all(engine, requests, 40)
        assert len(consumers.books.hashes) == 0
        assert await check(engine, consumers, requests[-40:], lambda: engine.block_hashes) > 20
        assert consumers.books.hashes == {signed(value) for value in engine.block_hashes}
        assert 40 < len(consumers.books.hashes) <= 80


async def test_random_requests_on_the_embedded_engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores: list[EngineCore] = []

    def watched(*arguments: Any) -> EngineCore:
        cores.append(EngineCore(*arguments))
        return cores[0]

    monkeypatch.setattr(embedded_engine, "EngineCore", watched)
    config = EmbeddedConfig(
        model=str(tiny_model), num_blocks=60, kv_block_size=SIZE, max_num_tokens=64, max_batch_size=8, threads=1
    )
    requests = prompts(random.Random(0), 300, 36)
    engine = create_engine(config)
    async with consuming(engine) as consumers:
        await run_all(engine, requests, 30)
        (pool,) = cores[0].blocks.pools
        assert await check(engine, consumers, requests[-40:], lambda: {event_hash(key) for key in pool.keys}) > 20
        assert 30 < len(consumers.books.hashes) <= 60


async def test_images_tell_blocks_apart() -> None:
    engine = create_engine(FakeConfig(num_blocks=100, block_size=SIZE, context_length=128))
    tokens = list(range(10, 34))
    async with consuming(engine) as consumers:
        await generate(engine, "a", tokens, images=(image("a", 6, 4), image("b", 10, 3)))
        await consumers.update()
        a, b = ({"mm_hash": int(key * 16, 16), "offsets": []} for key in "ab")
        infos = [None, {"mm_objects": [a]}, {"mm_objects": [b, a]}, {"mm_objects": [b]}, None, None]
        assert consumers.tree.blocks_of(tokens, mm_infos=infos) == 6
        assert consumers.tree.blocks_of(tokens, mm_infos=[None, {"mm_objects": [b]}, *infos[2:]]) == 1
        assert consumers.tree.blocks_of(tokens) == 1


async def test_dynamos_selection_service_subscribes_catches_up_and_understands() -> None:
    from dynamo.llm import SelectionService  # noqa: PLC0415

    size = 16
    engine = create_engine(FakeConfig(num_blocks=64, block_size=size, context_length=512))
    await engine.start()
    service = SelectionService(indexer_threads=1)

    async def blocks(tokens: range, **more: Any) -> int:
        found = await service.overlap_scores({"model_name": "m", "token_ids": [*tokens], **more})
        return int(found["workers"][0]["device_blocks"])

    async with publishing(engine) as publisher:
        await generate(engine, "before", range(10, 90))
        worker = {"worker_id": 7, "model_name": "m", "endpoint": "http://127.0.0.1:1", "block_size": size}
        channel = publisher.zmq.channels[0]
        await service.upsert_worker(
            worker | {"kv_events_endpoint": channel.endpoint, "replay_endpoint": channel.replay_endpoint}
        )
        await generate(engine, "after", range(110, 190))
        await generate(engine, "salted", range(210, 290), salt="tenant")
        await generate(engine, "seen", range(310, 390), images=(image("c", 20, 10),))
        mm_infos = [None, {"mm_objects": [{"mm_hash": int("c" * 16, 16), "offsets": []}]}, None, None, None]
        async with asyncio.timeout(20):
            nudge = 400
            while (
                await blocks(range(310, 390), block_mm_infos=mm_infos) != 5
            ):  # a message shows it what it has missed by then
                nudge += 1
                await generate(engine, f"nudge{nudge}", [nudge] * size)
                await asyncio.sleep(0.5)
        assert await blocks(range(10, 90)) == 5, "what it has missed"
        assert await blocks(range(110, 190)) == 5
        assert (await blocks(range(210, 290), cache_salt="tenant"), await blocks(range(210, 290))) == (5, 0)
        assert await blocks(range(310, 390)) == 1
        assert channel.replayed > 0
    service.shutdown()
    await engine.close()
