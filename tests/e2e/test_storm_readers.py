"""Clients that ask for 100,000 tokens, with log-probabilities, and stop reading."""

import asyncio
import random
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.servers import ServerProcess, serving
from tests.support.storm import SEEDS, TEXT, connected, memory, request, right
from tests.support.waiting import slowness

TOKENS = 100_000
READERS = 4
BODY = {
    "model": "fake",
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}
FLAGS = ("--max-seq-len", "131072", "--request-timeout-seconds", "600", "--fake-token-delay-ms", "0.2")
MOST_MEMORY = 32 << 20
"""Bytes for each reader: what comes within the timeout, and the buffers. A whole answer has ten times as many."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(*FLAGS, "--send-timeout-seconds", "2") as server:
        yield server


@pytest.mark.parametrize("seed", SEEDS)
async def test_readers_that_stop_take_little_memory_delay_nobody_and_are_cut_off(
    seed: int, server: ServerProcess
) -> None:
    rng = random.Random(seed)
    generated = server.metric("trtllm_generation_tokens_total")
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client, asyncio.TaskGroup() as group:

        async def running() -> float:
            page = (await client.get("/metrics")).text
            return next(
                float(line.split()[-1]) for line in page.splitlines() if line.startswith("trtllm_num_requests_running{")
            )

        async def stop_reading(seconds: float) -> None:
            """Read on for a while, and then no more, until the server closes the connection."""
            async with connected(server.url, 4096) as (reader, writer):
                writer.write(request("/v1/chat/completions", BODY))
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                with_time = asyncio.get_running_loop().time() + seconds
                while asyncio.get_running_loop().time() < with_time:
                    assert await reader.read(4096)
                writer.transport.pause_reading()
                await over.wait()
                writer.transport.resume_reading()
                rest = await reader.read(-1)
                assert b"[DONE]" not in rest

        over = asyncio.Event()
        assert await right(client)
        before = peak = memory(server)
        for _ in range(READERS):
            group.create_task(stop_reading(rng.random()))
        slowest = 0.0
        began = time.monotonic()
        while time.monotonic() - began < 2 or await running():
            asked = time.monotonic()
            assert await right(client)
            slowest = max(slowest, time.monotonic() - asked)
            peak = max(peak, memory(server))
            assert time.monotonic() - began < 40 * slowness()
            await asyncio.sleep(0.1)
        over.set()
    assert peak - before < READERS * MOST_MEMORY
    assert slowest < 2 * slowness()
    assert server.metric("trtllm_generation_tokens_total") - generated < READERS * TOKENS / 2
    server.wait_metric("trtllm_kv_cache_used_blocks", 0)
