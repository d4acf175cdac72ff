"""The benchmark's chats, against replicas and a router without a model."""

import httpx

from benchmarks.chats import Chats, Found, ask, converse
from benchmarks.routing import Replicas
from tests.support.disaggregated import replica
from tests.support.routing import Bare, chunked, router

CHATS = Chats(sessions=3, turns=3, concurrency=2, systems=2, system=20, user=4, answer=5, pause=0.0)


async def test_chats_count_what_was_cached() -> None:
    found = Found()
    async with replica("aggregated") as (url, _), router([url]) as (front, _):
        await converse(front, CHATS, "seed", "salt", found)
    rows = found.rows()
    assert found.kinds == {"right": 9}
    assert rows["requests"] == 9
    assert 50 < rows["hit rate, %"] < 100
    assert 0 < rows["TTFT p50, ms"] <= rows["TTFT p99, ms"]


async def test_kinds_of_failures_are_distinguished() -> None:
    said = {
        "HTTP 503": b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",
        "cut with an error": chunked(b'data: {"error": {}}\n\n') + b"0\r\n\r\n",
        "cut without a word": chunked(b'data: {"choices": []}\n\n'),
        "ended without a word": chunked(b'data: {"choices": []}\n\n') + b"0\r\n\r\n",
    }
    for kind, answer in said.items():
        async with Bare(answer) as bare, httpx.AsyncClient(base_url=bare.url) as client:
            assert await ask(client, {}, Found()) == (kind, "")


def test_routers_are_told_where_events_are() -> None:
    replicas = Replicas.__new__(Replicas)
    replicas.ports, replicas._flags = [(1, 2, 3), (4, 5, 6)], ["--engine", "fake"]
    argv = replicas.router("--route-policy", "round_robin").argv
    assert argv[argv.index("--route-events") + 1] == "tcp://127.0.0.1:2,tcp://127.0.0.1:5"
    assert argv[argv.index("--route-replays") + 1] == "tcp://127.0.0.1:3,tcp://127.0.0.1:6"
