"""A router before replicas on real sockets: unchanged answers, and failures of replicas."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from engine.process.sockets import free_port
from engine.replicas.routing import replica as replica_module
from routers.state import ReplicaState, RouterService
from tests.support.disaggregated import replica, stats_with
from tests.support.routing import Bare, before, chunked, router
from tests.support.servers import CHAT

SSE = {**CHAT, "stream": True}
LONG = {
    "messages": [{"role": "system", "content": "Be kind. " * 60}, {"role": "user", "content": "hello"}],
    "max_tokens": 4,
}


@asynccontextmanager
async def publishing(**settings: Any) -> AsyncIterator[tuple[str, ReplicaState, tuple[str, str]]]:
    """A replica that publishes its events."""
    sockets = tuple(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    given = {
        "publish_kv_events": True,
        "kv_events_endpoint": sockets[0],
        "kv_events_replay_endpoint": sockets[1],
        **settings,
    }
    async with replica("aggregated", **given) as (url, life):
        yield url, life, sockets


@asynccontextmanager
async def cluster(
    count: int = 2, router_settings: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ReplicaState, list[ReplicaState]]]:
    """A client of a router, the router, and the replicas behind it."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(publishing(**settings)) for _ in range(count)]
        events = {"route_events": tuple(one[2][0] for one in found), "route_replays": tuple(one[2][1] for one in found)}
        url, life = await stack.enter_async_context(
            router([one[0] for one in found], **events, **(router_settings or {}))
        )
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=10))
        await available(life, count)
        yield client, life, [one[1] for one in found]


async def available(life: ReplicaState, count: int) -> None:
    assert isinstance(life.service, RouterService)
    async with asyncio.timeout(20):
        while sum(one.available for one in life.service.fleet.replicas) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def learnt(life: ReplicaState, blocks: int) -> None:
    """The router knows as many blocks in all."""
    assert isinstance(life.service, RouterService)
    fleet = life.service.fleet
    async with asyncio.timeout(20):
        while sum(fleet.index.blocks(one.number) for one in fleet.replicas) < blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def without_time(text: str) -> str:
    return re.sub(r'"created":\d+', "", text)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/models", "/v1/models/other"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_those_of_the_replica(path: str, stream: bool) -> None:
    body = {"prompt": "hello", "stream": stream} if path == "/v1/completions" else {**CHAT, "stream": stream}
    body = {"prompt": "hello"} if path == "/tokenize" else body
    headers = {"x-request-id": "the-same"}
    async with replica("aggregated") as (url, _), before(url) as (client, _), httpx.AsyncClient(base_url=url) as direct:
        answers = [
            await (one.get(path, headers=headers) if "models" in path else one.post(path, json=body, headers=headers))
            for one in (direct, client)
        ]
    assert without_time(answers[0].text) == without_time(answers[1].text)
    assert answers[0].status_code == answers[1].status_code
    kept = {"content-type", "cache-control", "x-request-id", "x-accel-buffering"}
    direct_headers, headers_here = ({name: answer.headers.get(name) for name in kept} for answer in answers)
    assert direct_headers == headers_here
    assert answers[1].headers["x-trellis-replica"] == "0"
    assert answers[1].headers.get_list("date") == [answers[1].headers["date"]]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"messages": []}', 400),
        (b'{"messages": 7, "max_tokens": "x"}', 400),
        (b"", 400),
        (b'{"messages": [{"role": "user", "content": null}]}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "none"}}', 400),
    ],
)
async def test_replicas_say_what_is_wrong(body: bytes, status: int) -> None:
    async with replica("aggregated") as (url, _), before(url) as (client, _):
        answer = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["x-trellis-replica"] == "0"


async def test_forms_reach_the_replica_whole() -> None:
    """One that is understood is refused for the model's sake: it makes text."""
    form: Any = {"data": {"model": "fake"}, "files": {"file": ("a.wav", bytes(range(256)) * 1000)}}
    async with replica("aggregated") as (url, _), before(url) as (client, _):
        answer = await client.post("/v1/audio/transcriptions", **form)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("The model of this server does not transcribe audio")
    assert answer.headers["x-trellis-replica"] == "0"


async def test_equal_starts_go_to_one_replica() -> None:
    async with cluster(3) as (client, life, _):
        first = await client.post("/v1/chat/completions", json=LONG)
        await learnt(life, 16)
        others = [await client.post("/v1/chat/completions", json=LONG) for _ in range(6)]
        salted = [await client.post("/v1/chat/completions", json={**LONG, "cache_salt": f"s{i}"}) for i in range(12)]
    assert {answer.headers["x-trellis-replica"] for answer in others} == {first.headers["x-trellis-replica"]}
    assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500 for answer in others)
    assert len({answer.headers["x-trellis-replica"] for answer in salted}) > 1


async def test_a_session_stays_where_it_is() -> None:
    async with cluster(3, {"route_policy": "round_robin"}) as (client, _, _):
        alone = [await client.post("/v1/chat/completions", json=CHAT) for _ in range(6)]
        session = [
            await client.post("/v1/chat/completions", json=CHAT, headers={"x-session-id": "s" * 5000}) for _ in range(6)
        ]
    assert {answer.headers["x-trellis-replica"] for answer in alone} == {"0", "1", "2"}
    assert len({answer.headers["x-trellis-replica"] for answer in session}) == 1


async def test_api_keys_go_with_requests_and_probes() -> None:
    async with replica("aggregated", api_keys="one,two") as (url, _), before(url, api_keys="one,two") as (client, _):
        refused = await client.post("/v1/chat/completions", json=CHAT)
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer two"})
    assert refused.status_code == 401
    assert "x-trellis-replica" not in refused.headers
    assert answer.status_code == 200


async def test_a_client_that_goes_ends_the_request_at_once() -> None:
    async with cluster(1, fake_token_delay_ms=20) as (client, life, (peer,)):
        assert peer.engine is not None
        assert isinstance(life.service, RouterService)
        async with client.stream(
            "POST", "/v1/chat/completions", json={**SSE, "max_tokens": 5000, "ignore_eos": True}
        ) as answer:
            await anext(answer.aiter_bytes())
            await stats_with(peer.engine, lambda stats: stats.num_active_requests == 1)
        await stats_with(peer.engine, lambda stats: stats.num_active_requests == 0, 4.0)
        (one,) = life.service.fleet.replicas
        assert one.load.requests == 0
        assert one.load.tokens == 0


async def test_a_client_that_goes_before_the_answer_ends_the_request_too() -> None:
    async with Bare(b"", hang_up=False) as bare, before(bare.url) as (client, life):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=CHAT, timeout=httpx.Timeout(20, read=0.3))
        async with asyncio.timeout(4):
            await bare.ended.wait()
        assert isinstance(life.service, RouterService)
        assert [one.load.requests for one in life.service.fleet.replicas] == [0]


LOST = [
    b"",
    b"HTTP/1.1 200 OK\r\ncontent-le",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
    b"no HTTP at all\r\n\r\n",
    chunked(),
]


@pytest.mark.parametrize("said", LOST)
@pytest.mark.parametrize("stream", [False, True])
async def test_another_replica_is_asked_before_the_first_byte(said: bytes, stream: bool) -> None:
    async with Bare(said) as bare, replica("aggregated") as (url, _), before(bare.url, url) as (client, life):
        await available(life, 2)
        answers = list[httpx.Response]()
        while not bare.requests:  # which of them is asked is a matter of chance
            body = {**CHAT, "stream": stream, "cache_salt": str(len(answers))}
            answers.append(await client.post("/v1/chat/completions", json=body))
    assert {(answer.status_code, answer.headers["x-trellis-replica"]) for answer in answers} == {(200, "1")}


async def test_a_refusal_goes_to_another_replica_and_comes_back_if_there_is_none() -> None:
    refusal = b'HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 18\r\n\r\n{"error": "later"}'
    async with Bare(refusal) as bare, replica("aggregated") as (url, _), before(bare.url, url) as (client, life):
        await available(life, 2)
        answers = list[int]()
        while not bare.requests:  # which of them is asked is a matter of chance
            answers.append(
                (await client.post("/v1/chat/completions", json=CHAT | {"cache_salt": str(len(answers))})).status_code
            )
    assert set(answers) == {200}
    async with Bare(refusal) as bare, before(bare.url) as (client, _):
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.headers["retry-after"], answer.json()) == (503, "7", {"error": "later"})


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    said = chunked(b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\nda', b'ta: {"a"')
    async with Bare(said) as bare, before(bare.url) as (client, _):
        answer = await client.post("/v1/chat/completions", json=SSE)
    events = [line for line in answer.text.splitlines() if line]
    assert events[:2] == ['data: {"a": 1}', 'data: {"a": 2}']
    assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "engine_died"
    assert len(events) == 3


async def test_lines_come_whole_however_they_were_cut() -> None:
    whole = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\nno end'
    said = chunked(*(whole[i : i + 5] for i in range(0, len(whole), 5))) + b"0\r\n\r\n"
    async with Bare(said, hang_up=False) as bare, before(bare.url) as (client, _):
        answer = await client.post("/v1/chat/completions", json=SSE)
    assert answer.content == whole


async def test_without_replicas_it_is_not_ready() -> None:
    async with Bare(b"") as bare, before(bare.url) as (client, life):
        await bare.__aexit__()
        await available(life, 0)
        ready, answer = await client.get("/health/ready"), await client.post("/v1/chat/completions", json=CHAT)
    assert ready.status_code == answer.status_code == 503
    assert ready.json()["error"]["missing"][0]["name"] == "replicas"
    assert answer.json()["error"]["code"] == "not_ready"
    assert answer.headers["retry-after"]
    assert "No replica is ready, of 1: one cannot be reached." in ready.text and "one cannot be reached" in answer.text
    assert bare.url.removeprefix("http://") not in ready.text + answer.text


@pytest.mark.slow
async def test_requests_at_a_replica_that_hangs_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "SILENCE_SECONDS", 1.0)
    async with (
        Bare(b"", hang_up=False, hangs=True) as bare,
        replica("aggregated") as (url, _),
        before(bare.url, url) as (client, life),
    ):
        await available(life, 2)
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(6)))
        assert bare.requests
    assert {(answer.status_code, answer.headers["x-trellis-replica"]) for answer in answers} == {(200, "1")}


@pytest.mark.slow
async def test_requests_at_a_replica_whose_host_is_gone_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ends its connections, and there are no others."""
    monkeypatch.setattr(replica_module, "SILENCE_SECONDS", 1.0)
    async with (
        Bare(b"", hang_up=False, hangs=True) as bare,
        replica("aggregated") as (url, _),
        before(bare.url, url) as (client, life),
    ):
        await available(life, 2)
        asking = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(6)]
        async with asyncio.timeout(20):
            while not bare.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        bare.close()
        answers = await asyncio.gather(*asking)
    assert {(answer.status_code, answer.headers["x-trellis-replica"]) for answer in answers} == {(200, "1")}
