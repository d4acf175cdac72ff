"""Bodies of 64 MB, and floods of connections that want nothing good, through the shipped nginx configuration."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_nginx import needs_nginx, nginx_before
from tests.support.servers import ServerProcess, serving
from tests.support.storm import SEEDS, TEXT, connected, memory, request, right
from tests.support.waiting import slowness

MOST = 64 << 20
FLOOD = 200
MOST_MEMORY = 1 << 29
"""Bytes for two bodies at once: each comes in parts, is joined, and parsed."""
SMALL = {"model": "fake", "prompt": TEXT, "max_tokens": 16}


def body(kind: str) -> bytes:
    """A body of exactly the size that is allowed."""
    if kind == "not JSON":
        return b"x" * MOST
    start, end = {
        "spaces": (json.dumps(SMALL).encode(), b""),
        "unknown field": (json.dumps(SMALL).encode()[:-1] + b', "more": "', b'"}'),
        "long name": (b'{"prompt": "hi", "model": "', b'"}'),
    }[kind]
    return start + (b" " if kind == "spaces" else b"x") * (MOST - len(start) - len(end)) + end


EXPECTED = {"spaces": 200, "unknown field": 200, "not JSON": 400, "long name": 404}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--max-queue-size", "64", "--max-text-mb", "64") as server:
        yield server


async def flood(url: str, rng: random.Random) -> None:
    """Connect in one of many wrong ways, stay for a while and leave."""
    whole = request("/v1/completions", {**SMALL, "stream": True, "max_tokens": 1000, "ignore_eos": True})
    sent = rng.choice(
        [
            b"",
            whole[: rng.randrange(len(whole))],
            whole,
            rng.randbytes(200),
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 67108864\r\n\r\n" + rng.randbytes(1 << 16),
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 50,
        ]
    )
    await asyncio.sleep(rng.random() * 2)
    try:
        async with connected(url, rng.choice([0, 4096])) as (_, writer):
            writer.write(sent)
            await asyncio.sleep(rng.random() * 2)
    except ConnectionError:
        return


@needs_nginx
@pytest.mark.parametrize("seed", SEEDS)
async def test_large_bodies_and_floods_do_not_keep_others_from_their_answers(
    seed: int, server: ServerProcess, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    async with nginx_before(server.url.removeprefix("http://"), tmp_path) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            assert await right(client)
            before = peak = memory(server)
            statuses: Counter[tuple[str, int]] = Counter()

            async def send(kind: str) -> None:
                async with httpx.AsyncClient(base_url=url, timeout=120) as another:
                    headers = {"content-type": "application/json"}
                    answer = await another.post("/v1/completions", content=body(kind), headers=headers)
                    statuses[kind, answer.status_code] += 1

            kinds = rng.sample(sorted(EXPECTED), 2)
            async with asyncio.TaskGroup() as group:
                storm = [group.create_task(flood(url, rng)) for _ in range(FLOOD)]
                storm += [group.create_task(send(kind)) for kind in kinds]
                slowest = 0.0
                while not all(task.done() for task in storm):
                    asked = time.monotonic()
                    assert await right(client)
                    slowest = max(slowest, time.monotonic() - asked)
                    peak = max(peak, memory(server))
                    await asyncio.sleep(0.05)
            assert statuses == Counter((kind, EXPECTED[kind]) for kind in kinds)
            assert peak - before < MOST_MEMORY
            assert slowest < 5 * slowness()
            refused = await client.post("/v1/completions", content=b" " * (MOST + 1))
            assert refused.status_code == 413 and refused.json()["error"]["code"] == "request_too_large"
    server.wait_metric("trtllm_num_requests_running", 0, timeout=10 * slowness())
    server.wait_metric("trtllm_kv_cache_used_blocks", 0)
