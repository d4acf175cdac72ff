"""The routes of sleep and wake: access, answers, and the state of the replica meanwhile."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.errors import NotSupported
from engine.fake.engine import FakeEngine
from engine.sleep import SleepingEncoder, SleepingEngine, SleepOrder
from protocol.internal import MEDIA_TYPE
from routers.state import RouterService
from tests.routers.proxy.test_http import LONG, available, cluster, learnt
from tests.support.disaggregated import all_of, decode_engine, prefill_replica, tokens_of
from tests.support.disaggregated import request as prompt
from tests.support.encode import body_of, image
from tests.support.servers import CHAT, application
from tests.support.waiting import until

BOSS = {"authorization": "Bearer boss"}
CHATS = "/v1/chat/completions"
ENCODES: dict[str, Any] = {"disaggregation_mode": "encode", "internal_secret": "secret"}
ROUTES = [
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/release_memory"),
    ("POST", "/resume_memory"),
]


def backend_of(state: dict[str, Any]) -> FakeEngine:
    sleeper = state["replica"].sleeper
    assert isinstance(sleeper, SleepingEngine) and isinstance(sleeper.inner, FakeEngine)
    return sleeper.inner


async def metric(client: httpx.AsyncClient, name: str) -> float:
    page = (await client.get("/metrics")).text
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


async def test_without_an_admin_key_there_are_no_such_routes() -> None:
    async with application() as (client, state):
        assert state["replica"].sleeper is None
        for method, path in ROUTES:
            answer = await client.request(method, path, headers=BOSS)
            assert answer.status_code == 404 and "ADMIN_KEY" in answer.json()["error"]["message"]
        assert "trtllm_sleep_level" not in (await client.get("/metrics")).text


async def test_the_admin_key_is_needed_and_no_other_opens() -> None:
    async with application(admin_key="boss", api_keys=("user",), internal_secret="secret") as (client, _):
        for method, path in ROUTES:
            for headers in ({}, {"authorization": "Bearer user"}, {"authorization": "Bearer secret"}):
                answer = await client.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert (await client.get("/is_sleeping", headers={"x-api-key": "boss"})).json() == {"is_sleeping": False}
        assert (await client.post(CHATS, json=CHAT, headers=BOSS)).status_code == 401


async def test_asleep_a_replica_says_so_everywhere_and_wakes() -> None:
    async with application(admin_key="boss") as (client, state):
        before = (await client.post(CHATS, json=CHAT)).json()["choices"]
        for level in (1, 2):
            answer = await client.post("/sleep", params={"level": level}, headers=BOSS)
            assert (answer.status_code, answer.content) == (200, b"")
            assert (await client.get("/is_sleeping", headers=BOSS)).json() == {"is_sleeping": True}
            ready = await client.get("/health/ready")
            assert (ready.status_code, [part["name"] for part in ready.json()["error"]["missing"]]) == (503, ["sleep"])
            assert (await client.get("/health/live")).status_code == 200
            refused = await client.post(CHATS, json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
            assert refused.headers["retry-after"] == "2" and refused.headers["x-should-retry"] == "true"
            assert f"level {level}" in refused.json()["error"]["message"]
            assert (await client.post("/v1/messages", json={**CHAT, "model": "m"})).status_code == 503
            assert await metric(client, "trtllm_sleep_level") == level
            assert backend_of(state).released == {"weights", "kv_cache"}
            assert (await client.post("/wake_up", headers=BOSS)).content == b""
            assert (await client.get("/health/ready")).status_code == 200
            assert (await client.post(CHATS, json=CHAT)).json()["choices"] == before
        assert await metric(client, "trtllm_sleep_level") == 0
        assert await metric(client, "trtllm_wake_seconds") > 0


async def test_tags_by_their_names_here_and_at_tensorrt() -> None:
    async with application(admin_key="boss") as (client, state):
        released = backend_of(state).released

        async def post(path: str, **options: Any) -> httpx.Response:
            return await client.post(path, headers=BOSS, **options)

        assert (await post("/sleep?tags=")).status_code == 200 and backend_of(state).released == {"weights", "kv_cache"}
        assert (await post("/wake_up?tags=weights&tags=kv_cache")).status_code == 200 and not backend_of(state).released
        await post("/sleep?level=1&mode=wait&tags=kv_cache")
        assert backend_of(state).released == {"kv_cache"}
        await post("/sleep?tags=weights,kv_cache")
        await post("/wake_up?tags=weights")
        assert backend_of(state).released == {"kv_cache"}
        assert (await client.get("/is_sleeping", headers=BOSS)).json() == {"is_sleeping": True}
        await post("/wake_up")
        assert (await post("/release_memory", json={"tags": ["model", "sampler"]})).json() == {"status": "success"}
        assert backend_of(state).released == {"weights"}
        assert (await post("/release_memory")).json() == {"status": "success"}
        assert backend_of(state).released == {"weights", "kv_cache"}
        assert (await post("/resume_memory", json={"tags": ["model", "kv_cache"]})).json() == {"status": "success"}
        assert not released and (await client.get("/health/ready")).status_code == 200
        for path, body, said in [
            ("/sleep?level=3", None, "level"),
            ("/sleep?level=deep", None, "level"),
            ("/sleep?mode=keep", None, "mode"),
            ("/sleep?tags=heads", None, "There is no memory 'heads'"),
            ("/release_memory", {"tags": ["heads"]}, "There is no memory 'heads'"),
        ]:
            answer = await post(path, json=body) if body else await post(path)
            assert answer.status_code == 400 and said in answer.text, answer.text
        assert (await client.get("/sleep", headers=BOSS)).status_code == 405
        assert not backend_of(state).released


async def test_a_stream_that_is_aborted_ends_with_an_error_event() -> None:
    async with application(admin_key="boss", fake_token_delay_ms=2) as (client, state):
        body = {**CHAT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        running = asyncio.create_task(client.post(CHATS, json=body))
        await until(lambda: backend_of(state).running)
        waiting = asyncio.create_task(client.post("/sleep?mode=wait", headers=BOSS))
        await until(lambda: state["replica"].sleep.phase == "falling_asleep")
        assert (await client.post(CHATS, json=CHAT)).json()["error"]["code"] == "asleep"
        assert (await client.post("/sleep?mode=abort", headers=BOSS)).status_code == 200
        assert (await waiting).status_code == 200
        events = [json.loads(line[6:]) for line in (await running).text.splitlines() if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "asleep"
        assert events[-1]["error"]["message"] == "The replica was put to sleep while the request ran."
        await client.post("/wake_up", headers=BOSS)
        running = asyncio.create_task(client.post(CHATS, json={**body, "max_tokens": 100}))
        await until(lambda: backend_of(state).running)
        waiting = asyncio.create_task(client.post("/sleep?mode=wait", headers=BOSS))
        await until(lambda: state["replica"].sleep.phase == "falling_asleep")
        assert (await client.post("/wake_up", headers=BOSS)).status_code == 200
        given_up = await waiting
        assert (given_up.status_code, given_up.json()["error"]["code"]) == (409, "woken")
        assert (await running).text.endswith("data: [DONE]\n\n")


async def test_sleep_is_refused_while_the_server_starts_or_shuts_down() -> None:
    async with application(wait=False, admin_key="boss") as (client, state):
        for method, path in ROUTES:
            answer = await client.request(method, path, headers=BOSS)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        await until(lambda: state["replica"].ready)
        await client.post("/sleep", headers=BOSS)
        state["replica"].draining = True
        answer = await client.post("/wake_up", headers=BOSS)
        assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]


async def test_an_idle_replica_sleeps_stays_ready_and_is_woken_by_a_request() -> None:
    idle = {"sleep_after_idle_seconds": 0.05, "sleep_level": 2, "canary_seconds": 0.02}
    async with application(**idle) as (client, state):
        await until(lambda: backend_of(state).released)
        await until(lambda: state["replica"].sleep.phase == "asleep")
        assert (await client.get("/health/ready")).status_code == 200
        assert await metric(client, "trtllm_sleep_level") == 2
        assert (await client.post("/sleep", headers=BOSS)).status_code == 404
        assert (await client.post(CHATS, json=CHAT)).status_code == 200
    async with application(**idle, wake_on_demand=False, admin_key="boss") as (client, state):
        await until(lambda: state["replica"].sleep.phase == "asleep")
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.post(CHATS, json=CHAT)).json()["error"]["code"] == "asleep"
        assert (await client.post("/wake_up", headers=BOSS)).status_code == 200


async def test_orders_that_a_backend_does_not_support_are_501(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: SleepOrder) -> None:
        raise NotSupported("It sleeps at level 1 alone.")

    async with application(admin_key="boss") as (client, state):
        monkeypatch.setattr(state["replica"].sleeper, "sleep", refuse)
        answer = await client.post("/sleep?level=2", headers=BOSS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_supported")
        assert answer.json()["error"]["message"] == "It sleeps at level 1 alone."


async def test_a_prefill_replica_tells_its_peers() -> None:
    secret = {"authorization": "Bearer secret"}
    settings: dict[str, Any] = {"disaggregation_mode": "prefill", "internal_secret": "secret", "admin_key": "boss"}
    async with application(**settings) as (client, _):
        assert (await client.get("/prefill", headers=secret)).status_code == 200
        await client.post("/sleep", headers=BOSS)
        for answer in (await client.get("/prefill", headers=secret), await client.post("/prefill", headers=secret)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "asleep")
        await client.post("/wake_up", headers=BOSS)
        assert (await client.get("/prefill", headers=secret)).status_code == 200


@pytest.mark.slow
async def test_a_router_takes_a_sleeping_replica_out_at_once() -> None:
    async with cluster(2, admin_key="boss") as (client, life, replicas):
        assert isinstance(life.service, RouterService)
        fleet = life.service.fleet
        first = await client.post(CHATS, json=LONG)
        await learnt(life, 16)
        number = int(first.headers["x-trellis-replica"])
        home = next(replica for replica in fleet.replicas if replica.number == number)
        sleeper = replicas[number].sleeper
        assert sleeper is not None and fleet.blocks(home)
        await sleeper.sleep(SleepOrder())
        asked = 0
        async with asyncio.timeout(30):
            while home.available or asked < 3:
                answer = await client.post(CHATS, json=LONG)
                assert answer.status_code == 200 and answer.headers["x-trellis-replica"] != str(number)
                asked += 1
        assert home.reason.startswith("one ")
        await until(lambda: not fleet.blocks(home))
        await sleeper.wake_up()
        await available(life, 2)


async def test_a_decode_replica_goes_on_without_a_sleeping_prefill_replica() -> None:
    async with prefill_replica(admin_key="boss") as (url, _, life), decode_engine([url]) as (engine, seen):
        before = tokens_of(await all_of(engine, prompt("a")))
        assert seen.peers == {url: True} and life.sleeper is not None
        await life.sleeper.sleep(SleepOrder())
        assert tokens_of(await all_of(engine, prompt("b"))) == before
        await until(lambda: seen.peers == {url: False})
        await life.sleeper.wake_up()
        await until(lambda: seen.peers == {url: True})
        assert tokens_of(await all_of(engine, prompt("c"))) == before


async def test_an_encode_replica_sleeps_and_tells_its_peers() -> None:
    async with application(**ENCODES, admin_key="boss") as (client, state):
        sleeper, secret = state["replica"].sleeper, {"authorization": "Bearer secret"}
        message = {**secret, "content-type": MEDIA_TYPE}
        assert isinstance(sleeper, SleepingEncoder) and sleeper.inner.healthy
        await client.post("/sleep", headers=BOSS)
        assert not sleeper.inner.healthy, "its weights are given back"
        for answer in (await client.get("/encode", headers=secret), await client.post("/encode", headers=secret)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "asleep")
        missing = (await client.get("/health/ready")).json()["error"]["missing"]
        assert [part["name"] for part in missing] == ["sleep"] and await metric(client, "trtllm_sleep_level") == 1
        await client.post("/wake_up", headers=BOSS)
        assert (await client.get("/encode", headers=secret)).status_code == 200
        assert (await client.post("/encode", content=body_of([image(1)]), headers=message)).status_code == 200


async def test_an_idle_encode_replica_is_woken_by_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = {"sleep_after_idle_seconds": 0.5, "canary_seconds": 0.02}  # the first canary comes well before the sleep
    encode, canaries = SleepingEncoder.encode, []

    async def noted(self: SleepingEncoder, *args: Any, counts: bool = True) -> Any:
        canaries.extend([] if counts else [args])
        return await encode(self, *args, counts=counts)

    monkeypatch.setattr(SleepingEncoder, "encode", noted)
    async with application(**ENCODES, **idle) as (client, state):
        await until(lambda: canaries)  # a sleep waits for those that run
        await until(lambda: state["replica"].sleep.phase == "asleep")
        headers = {"authorization": "Bearer secret", "content-type": MEDIA_TYPE}
        assert (await client.get("/encode", headers=headers)).status_code == 200, "it would take an image"
        assert (await client.post("/encode", content=body_of([image(1)]), headers=headers)).status_code == 200
        await until(lambda: state["replica"].sleep.phase == "asleep")
