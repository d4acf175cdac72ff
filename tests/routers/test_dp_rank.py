"""The data-parallel rank that a router chooses, on its way to the engine: a replica takes it from routers only."""

from typing import Any

import httpx
import pytest

from tests.support.disaggregated import SECRET, replica
from tests.support.routing import Bare, before, stored, two_senders
from tests.support.servers import CHAT
from tests.support.waiting import until

ROUTED = {"x-trellis-dp-rank": "1", "x-trellis-internal": SECRET}
TWO_RANKS = b'HTTP/1.1 200 OK\r\ncontent-length: 38\r\n\r\n{"runtime": {"data_parallel_size": 2}}'


@pytest.mark.parametrize(
    ("headers", "rank"),
    [
        (ROUTED, 1),
        ({"x-trellis-dp-rank": "1"}, None),
        ({**ROUTED, "x-trellis-internal": "guess"}, None),
        ({**ROUTED, "x-trellis-internal": ""}, None),
        ({**ROUTED, "x-trellis-dp-rank": "-1"}, None),
        ({**ROUTED, "x-trellis-dp-rank": "1e3"}, None),
        ({**ROUTED, "x-trellis-dp-rank": "9" * 40}, None),
        ({"authorization": f"Bearer {SECRET}", "x-trellis-dp-rank": "1"}, None),
    ],
)
async def test_a_replica_takes_a_rank_from_routers_only(headers: dict[str, str], rank: int | None) -> None:
    assert await ranks_of(headers) == [rank, rank]


async def test_a_replica_without_the_secret_takes_none() -> None:
    assert await ranks_of(ROUTED, internal_secret=None) == [None, None]


async def ranks_of(headers: dict[str, str], **settings: Any) -> list[int | None]:
    """The ranks that the engine is told of a streamed and another answer."""
    async with replica("aggregated", **settings) as (url, life), httpx.AsyncClient(base_url=url) as client:
        assert life.engine is not None
        told, generate = list[int | None](), life.engine.generate

        def noting(request: Any) -> Any:
            told.append(request.dp_rank)
            return generate(request)

        life.engine.generate = noting  # type: ignore[method-assign]
        for stream in (True, False):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers)
            assert answer.status_code == 200
    return told


@pytest.mark.parametrize("secret", [SECRET, None])
async def test_a_router_names_the_rank_if_it_has_the_secret(secret: str | None) -> None:
    senders = await two_senders()
    async with (
        Bare(TWO_RANKS) as bare,
        before(bare.url, route_events=(senders[0].endpoint,), internal_secret=secret) as (client, life),
    ):
        for sender in senders:
            await sender.subscribed()
        await senders[0].send(stored([1]))
        service: Any = life.service
        await until(lambda: len(service.fleet.index) == 1)
        await client.post("/v1/chat/completions", json=CHAT, headers=ROUTED | {"x-trellis-dp-rank": "7"})
        sent = bare.requests[-1].lower()
    for sender in senders:
        await sender.close()
    if secret is None:
        assert b"x-trellis" not in sent
    else:
        assert sent.count(b"x-trellis-dp-rank: ") == sent.count(b"x-trellis-internal: ") == 1
        assert b"x-trellis-dp-rank: 7" not in sent and f"x-trellis-internal: {secret}".encode() in sent
