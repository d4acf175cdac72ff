"""KV-cache events of TensorRT-LLM's backend, on the stand-in for the package, as a router gets them."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.publisher import BLOCK, Books, DynamoTree, followers, generate, publishing
from tests.support.trtllm_gotchas import running

pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed (constraints-dev.txt, Linux)")

trt, folder = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder  # fixtures


async def test_a_router_foretells_what_the_engine_has(folder: Path) -> None:
    draw, books, tree, applied = random.Random(0), Books(), DynamoTree(BLOCK), 0
    stems = [[draw.randrange(3, 60) for _ in range(24)] for _ in range(3)]
    cache = {"event_buffer_max_size": 10_000, "tokens_per_block": BLOCK}
    async with (
        running(folder, kv_cache_config=cache) as engine,
        publishing(engine) as publisher,
        followers(publisher) as (follower,),
    ):
        found = 0
        for number in range(25):
            prompt = [
                *draw.choice(stems)[: draw.randrange(24)],
                *(draw.randrange(3, 6) for _ in range(draw.randrange(1, 10))),
            ]
            foretold = min(tree.blocks_of(prompt), (len(prompt) - 1) // BLOCK)
            assert await generate(engine, f"r{number}", prompt, draw.randrange(1, 8)) == foretold * BLOCK
            found += foretold
            async with asyncio.timeout(10):
                while tree.blocks_of(prompt) < len(prompt) // BLOCK:
                    await asyncio.sleep(0.01)
                    await follower.catch_up(applied)
                    for event in follower.events_from(applied):
                        books.apply(event)
                        tree.apply(event)
                    applied = len(follower.payloads)
        assert publisher.failure is None
        assert publisher.ranks[0].converter.lost == 0
    assert found > 20
    assert len(books.hashes) > 40
