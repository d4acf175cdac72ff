"""/v1/messages/batches: the life of a batch, across restarts, and its visibility."""

import asyncio
import json
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.errors import EngineDied, QueueFull
from multimodal.request import Ask
from protocol.batches import BatchesPage, MessageBatch
from protocol.messages import MessagesErrorEnvelope, MessagesRequest, WholeMessage
from routers.batches import store as store_module
from routers.batches.store import BatchJob, BatchStore
from routers.batches.worker import BatchWorker
from routers.body import INLINE_BYTES
from routers.fields import FieldCheck
from routers.messages import convert
from server.http.errors import render_event
from tests.routers.proxy.test_http import available
from tests.support.disaggregated import replica
from tests.support.routing import router
from tests.support.servers import application
from tests.support.waiting import slowness

PATH = "/v1/messages/batches"
PARAMS: dict[str, Any] = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
BEGUN = 'trtllm_num_requests_running{model_name="fake"} 1.0'


def requests(*params: dict[str, Any]) -> dict[str, Any]:
    return {"requests": [{"custom_id": f"r{place}", "params": PARAMS | one} for place, one in enumerate(params)]}


async def create(client: httpx.AsyncClient, *params: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=requests(*params), **options)
    assert answer.status_code == 200, answer.text
    return checked(answer)


def checked(answer: httpx.Response) -> dict[str, Any]:
    MessageBatch.model_validate(answer.json())
    return dict(answer.json())


async def begun(client: httpx.AsyncClient) -> None:
    """The engine has a request."""
    async with asyncio.timeout(10 * slowness()):
        while BEGUN not in (await client.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def ended(client: httpx.AsyncClient, batch: str, **options: Any) -> dict[str, Any]:
    async with asyncio.timeout(20 * slowness()):
        while (found := checked(await client.get(f"{PATH}/{batch}", **options)))["processing_status"] != "ended":
            counts = found["request_counts"]
            assert counts["processing"] == sum(counts.values()) > 0
            await asyncio.sleep(0.01)
    return found


async def results(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    answer = await client.get(batch["results_url"])
    assert answer.headers["content-type"] == "application/x-jsonl"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    return {line["custom_id"]: line["result"] for line in lines}


async def test_the_life_of_a_batch(tmp_path: Path) -> None:
    async with application(cache_dir=tmp_path, api_keys="one,two", max_batch_size=2) as (client, _):
        client.headers["x-api-key"] = "one"
        wrong = ({"max_tokens": 0}, {"model": "other"}, {"stream": True}, {"messages": []})
        batch = await create(client, {}, *wrong, {"max_tokens": 2})
        assert batch["processing_status"] == "in_progress" and batch["results_url"] is None
        found = await ended(client, batch["id"])
        assert found["request_counts"] == {"processing": 0, "succeeded": 2, "errored": 4, "canceled": 0, "expired": 0}
        lines = await results(client, found)
        assert list(lines) == [f"r{place}" for place in range(6)]
        assert WholeMessage.model_validate(lines["r0"]["message"]).usage.output_tokens == 3
        errors = [MessagesErrorEnvelope.model_validate(lines[f"r{place}"]["error"]).error for place in range(1, 5)]
        assert [error.type for error in errors] == ["invalid_request_error", "not_found_error"] + 2 * [
            "invalid_request_error"
        ]
        for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            other = await client.request(method, f"{PATH}/{batch['id']}{path}", headers={"x-api-key": "two"})
            assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
        assert (await client.get(PATH, headers={"x-api-key": "two"})).json()["data"] == []
        assert (await client.delete(f"{PATH}/{batch['id']}")).json()["type"] == "message_batch_deleted"
        assert (await client.get(f"{PATH}/{batch['id']}")).status_code == 404


async def test_pages(tmp_path: Path) -> None:
    async with application(cache_dir=tmp_path) as (client, _):
        ids = [(await create(client, {}))["id"] for _ in range(5)][::-1]

        async def page(**query: Any) -> tuple[list[str], bool]:
            found = BatchesPage.model_validate((await client.get(PATH, params=query)).json())
            shown = [batch.id for batch in found.data]
            assert (found.first_id, found.last_id) == (shown[0], shown[-1])
            return shown, found.has_more

        assert await page() == (ids, False)
        assert await page(limit=2) == (ids[:2], True)
        assert await page(limit=2, after_id=ids[1]) == (ids[2:4], True)
        assert await page(limit=2, after_id=ids[2]) == (ids[3:], False)
        assert await page(limit=2, before_id=ids[3]) == (ids[1:3], True)
        assert await page(limit=2, before_id=ids[2]) == (ids[:2], False)
        for query in ({"limit": 0}, {"limit": "x"}):
            answer = await client.get(PATH, params=query)
            assert (answer.status_code, "'limit'" in answer.json()["error"]["message"]) == (400, True), answer.text
        assert (await client.get(PATH, params={"after_id": "x"})).status_code == 404


async def test_cancelled_requests_never_begin_and_running_ones_finish(tmp_path: Path) -> None:
    async with application(cache_dir=tmp_path, batch_concurrency=1, fake_token_delay_ms=30) as (client, _):
        batch = await create(client, {"max_tokens": 20}, {}, {})
        await begun(client)
        assert (await client.get(f"{PATH}/{batch['id']}/results")).status_code == 400
        assert (await client.delete(f"{PATH}/{batch['id']}")).status_code == 400
        canceled = checked(await client.post(f"{PATH}/{batch['id']}/cancel"))
        assert canceled["processing_status"] == "canceling" and canceled["cancel_initiated_at"]
        found = await ended(client, batch["id"])
        assert [result["type"] for result in (await results(client, found)).values()] == [
            "succeeded",
            "canceled",
            "canceled",
        ]
        again = checked(await client.post(f"{PATH}/{batch['id']}/cancel"))
        assert again == found


async def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with application(cache_dir=tmp_path, batch_concurrency=1, fake_token_delay_ms=1000) as (client, _):
        batch = await create(client, {}, {})
        await begun(client)
    async with application(cache_dir=tmp_path) as (client, _):
        found = await ended(client, batch["id"])
    assert found["request_counts"]["succeeded"] == 2


async def test_keys_take_turns_and_go_on_with_them_after_a_restart(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches.sqlite", 1 << 20, 10)
    for owner, batch, count in (("a", "a1", 3), ("a", "a2", 2), ("b", "b1", 2), ("c", "c1", 1)):
        await store.create(owner, batch, [(f"{batch}-{place}", batch.encode()) for place in range(count)])

    async def taken() -> BatchJob:
        job = await store.take()
        assert job is not None
        return job

    for batch in (b"a1", b"b1"):  # these run when the process ends
        assert (await taken()).params == batch
    await store.close()
    store = BatchStore(tmp_path / "batches.sqlite", 1 << 20, 10)
    await store.resume()
    running = [await taken(), await taken()]
    order = [job.params.decode() for job in running]
    while running:
        assert await store.finish(running.pop(0), "succeeded", b"")
        if (job := await store.take()) is not None:
            running.append(job)
            order.append(job.params.decode())
    assert order == ["a1", "b1", "c1", "a1", "b1", "a1", "a2", "a2"]
    assert [(await store.get("a", batch)).counts for batch in ("a1", "a2")] == [{"succeeded": 3}, {"succeeded": 2}]
    await store.close()


async def test_a_key_with_ever_new_batches_does_not_keep_another_waiting(tmp_path: Path) -> None:
    store, order = BatchStore(tmp_path / "batches.sqlite", 1 << 20, 10), b""
    await store.create("a", "a", [(f"a-{place}", b"a") for place in range(3)])
    for place in range(6):
        await store.create("b", f"b{place}", [("b", b"b")])
        job = await store.take()
        assert job is not None
        order += job.params
        await store.finish(job, "succeeded", b"")
    assert order == b"ababab"
    await store.close()


async def test_late_requests_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "EXPIRY_SECONDS", 0.0)
    async with application(cache_dir=tmp_path) as (client, _):
        found = await ended(client, (await create(client, {}, {}))["id"])
        assert [result["type"] for result in (await results(client, found)).values()] == ["expired", "expired"]


@pytest.mark.parametrize(
    ("settings", "body", "status", "word"),
    [
        ({"batches_mb": 0}, requests({}), 400, "BATCHES_MB"),
        ({"batch_max_requests": 1}, requests({}, {}), 400, "'requests' may have 1 entries"),
        ({"batches_mb": 1}, requests({"system": "x" * (1 << 20)}), 429, "no room"),
        ({}, {"requests": 2 * requests({})["requests"]}, 400, "'requests.1.custom_id'"),
        ({}, {"requests": [{"custom_id": "a b", "params": {}}]}, 400, "'requests.0.custom_id' must match"),
        ({}, {"requests": []}, 400, "'requests' must have 1 or more"),
    ],
)
async def test_bounds(tmp_path: Path, settings: dict[str, Any], body: Any, status: int, word: str) -> None:
    async with application(cache_dir=tmp_path, **settings) as (client, _):
        answer = await client.post(PATH, json=body)
    assert (answer.status_code, word in answer.json()["error"]["message"]) == (status, True), answer.text


async def test_large_requests_do_not_hold_up_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def dumps(value: Any) -> str:
        threads.add(threading.get_ident())
        return json.dumps(value)

    def noted(body: MessagesRequest) -> Ask:
        threads.add(threading.get_ident())
        return convert(body)

    monkeypatch.setattr("routers.batches.routes.json", SimpleNamespace(dumps=dumps))
    monkeypatch.setattr("routers.batches.worker.convert", noted)
    async with application(cache_dir=tmp_path) as (client, _):
        found = await ended(client, (await create(client, {"system": "x" * INLINE_BYTES}))["id"])
    assert found["request_counts"]["succeeded"] + found["request_counts"]["errored"] == 1
    assert threads and threading.get_ident() not in threads


async def test_a_router_finds_the_replica_that_has_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica has a store of its own, and the second router has seen no answer. Clients have sessions with
    different replicas.
    """
    async with AsyncExitStack() as stack:
        urls = []
        for number in range(2):
            urls.append((await stack.enter_async_context(replica("aggregated", cache_dir=tmp_path / str(number))))[0])
        clients = []
        for place in range(2):
            url, life = await stack.enter_async_context(router(urls, route_policy="round_robin", route_attempts=1))
            await available(life, 2)
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=10)))
            for session in "abc":
                clients[-1].headers["x-session-id"] = session
                counted = await clients[-1].post("/v1/messages/count_tokens", json=PARAMS)
                if counted.headers["x-trellis-replica"] == str(place):
                    break
        client, other = clients
        made = [await create(client, {}) for _ in range(3)]
        for asking in clients:
            listed = BatchesPage.model_validate((await asking.get(PATH)).json()).data
            assert [batch.id for batch in listed] == [batch["id"] for batch in made[::-1]]
        found = await ended(other, made[0]["id"])
        assert found["results_url"] == f"{str(other.base_url).rstrip('/')}{PATH}/{made[0]['id']}/results"
        assert (await results(other, found))["r0"]["type"] == "succeeded"
        with monkeypatch.context() as patched:
            patched.setattr("routers.proxy.http._MAX_ANSWER", 10)
            long = await client.get(f"{PATH}/{made[0]['id']}/results")
            assert (long.status_code, long.json()["error"]["type"]) == (500, "api_error")
        assert checked(await client.get(f"{PATH}/{made[0]['id']}"))["id"] == found["id"], "the replica is in use"
        assert checked(await other.post(f"{PATH}/{made[1]['id']}/cancel"))["id"] == made[1]["id"]
        assert (await other.delete(f"{PATH}/{made[0]['id']}")).json()["type"] == "message_batch_deleted"
        missing = await client.get(f"{PATH}/{made[0]['id']}")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("error", "attempts", "room"),
    [(EngineDied("dead"), 3, 1 << 20), (QueueFull("full"), 2, 1 << 20), (RuntimeError("long " * 40), 1, 400)],
    ids=["the engine dies", "the queue is full", "no room for the result"],
)
async def test_a_request_is_done_again_but_not_for_ever(
    tmp_path: Path, error: Exception, attempts: int, room: int
) -> None:
    asked: list[int] = []

    async def prepare(*_: Any) -> Any:
        asked.append(1)
        if isinstance(error, QueueFull) and len(asked) == attempts:
            raise RuntimeError("another")
        raise error

    store = BatchStore(tmp_path / "batches.sqlite", room, 10)
    worker = BatchWorker(
        store=store,
        processor=SimpleNamespace(prepare=prepare),  # type: ignore[arg-type]
        fields=FieldCheck("fake", strict=False, model_optional=True),
        max_text_bytes=1 << 20,
        max_values=1000,
        render_error=render_event,
        concurrency=1,
        ready=lambda: True,
        pause=0.01,
    )
    record = await store.create("", "batch", [("a", json.dumps(PARAMS).encode())])
    working = asyncio.create_task(worker.run())
    async with asyncio.timeout(10 * slowness()):
        while record.ended is None:
            record = await store.get("", "batch")
            await asyncio.sleep(0.005)
    working.cancel()
    await asyncio.wait([working])
    await store.close()
    assert (len(asked), record.counts) == (attempts, {"errored": 1})
