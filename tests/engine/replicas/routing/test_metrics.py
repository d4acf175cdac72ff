"""A router's metrics."""

import re

import httpx

from benchmarks.metrics import total
from tests.support.disaggregated import replica
from tests.support.routing import Bare, router
from tests.support.servers import CHAT


async def test_requests_are_counted_by_replica_and_nothing_else() -> None:
    async with (
        replica("aggregated") as (url, _),
        Bare(b"") as bare,
        router([url, bare.url]) as (front, _),
        httpx.AsyncClient(base_url=front) as client,
    ):
        for number in range(8):
            headers = {"x-session-id": f"evil-{number % 2}", "x-request-id": f"evil-{number}"}
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        await client.get("/v1/evil")
        page = (await client.get("/metrics")).text
        info = (await client.get("/server_info")).json()
    counts = {
        (m[1], m[2]): float(m[3])
        for m in re.finditer(r'router_requests_total\{.*outcome="(\w+)",replica="(\d)"\} (\S+)', page)
    }
    assert counts["ok", "0"] == 9
    assert counts.get(("unreachable", "1"), 0) == total(page, "trtllm_router_retries_total")
    assert total(page, "trtllm_router_session_requests_total") >= 5
    assert total(page, "trtllm_router_prompt_tokens_total") > 0
    assert total(page, "trtllm_router_tokenize_seconds_count") == 8
    assert url.removeprefix("http://") not in page
    assert "evil" not in page
    assert info["runtime"]["role"] == "router"
