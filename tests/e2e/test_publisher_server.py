"""Servers that publish KV-cache events: which process publishes, failures, and metrics."""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import zmq.asyncio

from engine.replicas.publisher.messages import AllBlocksCleared, BlockStored, EventBatch, WireEvent, decode
from tests.support.publisher import Books, replayed, stored
from tests.support.servers import CHAT, ServerProcess, application, serving
from tests.support.waiting import slowness

LONG_CHAT = {**CHAT, "messages": [{"role": "user", "content": "hello " * 40}], "ignore_eos": True, "max_tokens": 40}


def where(folder: Path) -> dict[str, Any]:
    return {
        "publish_kv_events": True,
        "kv_events_endpoint": f"ipc://{folder}/kv",
        "kv_events_replay_endpoint": f"ipc://{folder}/again",
    }


def flags(folder: Path) -> list[str]:
    return [
        part for name, value in where(folder).items() for part in (f"--{name.replace('_', '-')}", str(value).lower())
    ]


async def batches(folder: Path) -> list[EventBatch]:
    """All messages that have been published."""
    return [decode(payload) for _, payload in await replayed(f"ipc://{folder}/again", 0)]


async def events(folder: Path) -> list[WireEvent]:
    return [event for batch in await batches(folder) for event in batch.events]


def text(said: list[WireEvent]) -> bytes:
    """The text of stored blocks, by the fake engine's tokens: three special ones, then bytes."""
    tokens = [token for event in said if isinstance(event, BlockStored) for token in event.token_ids]
    return bytes(token - 3 for token in tokens if token >= 3)


def wait(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_events_come_from_requests_and_are_measured(tmp_path: Path) -> None:
    async with application(**where(tmp_path), kv_events_buffer=123) as (client, _):
        assert (await client.post("/v1/chat/completions", json=LONG_CHAT)).status_code == 200
        said = await events(tmp_path)
        assert isinstance(said[0], AllBlocksCleared)
        assert text(said).count(b"hello") > 40  # the output's too: the fake engine echoes
        page = (await client.get("/metrics")).text
        values = dict(re.findall(r"^trtllm_kv_event_(\w+)\{[^}]*\} (\S+)", page, re.MULTILINE))
        assert float(values["published_events_total"]) == len(said)
        assert (
            float(values["published_messages_total"])
            == float(values["replayed_messages_total"])
            == len(await batches(tmp_path))
        )
        assert float(values["published_bytes_total"]) > 200
        assert (values["id_gap_events_total"], values["buffer_capacity"], values["publisher_up"]) == (
            "0.0",
            "123.0",
            "1.0",
        )


async def test_a_prefill_replica_publishes_too(tmp_path: Path) -> None:
    async with application(**where(tmp_path), disaggregation_mode="prefill", internal_secret="s"):
        assert (tmp_path / "kv").is_socket()


async def test_events_are_not_published_unless_enabled(tmp_path: Path) -> None:
    async with application(**{**where(tmp_path), "publish_kv_events": False}) as (client, _):
        assert not (tmp_path / "kv").exists()
        assert "trtllm_kv_event" not in (await client.get("/metrics")).text


async def test_an_error_shows_in_readiness_and_on_the_next_request(tmp_path: Path) -> None:
    async with application(**where(tmp_path)) as (client, state):
        fake = state["replica"].engine.inner
        fake.events.put(stored(1, 5, rank=3))  # of a rank that the engine said it does not have
        while state["replica"].ready:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.005)
        reason = "KV-cache events are no longer published: an event is of data-parallel rank 3, of 1."
        ready = await client.get("/health/ready")
        assert ready.status_code == 503
        assert {"name": "kv_events", "reason": reason} in ready.json()["error"]["missing"]
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == reason
        assert 'trtllm_kv_event_publisher_up{model_name="fake"} 0.0' in (await client.get("/metrics")).text


def test_an_address_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    with zmq.Context.instance().socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        server = ServerProcess("--publish-kv-events", "true", "--kv-events-endpoint", address)
        assert server.wait(60 * slowness()) == 1
        assert f"KV-cache events cannot be published on {address}: Address already in use" in server.log


def test_a_new_engine_process_begins_with_nothing(tmp_path: Path) -> None:
    with serving(*flags(tmp_path)) as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=LONG_CHAT).raise_for_status()
        before = asyncio.run(batches(tmp_path))
        server.child("engine.process.host").kill()
        server.wait_metric("trellis_engine_restarts_total", 1)
        wait(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200)
        httpx.post(f"{server.url}/v1/chat/completions", json=LONG_CHAT).raise_for_status()
        after = asyncio.run(batches(tmp_path))[len(before) :]
        assert isinstance(after[0].events[0], AllBlocksCleared)
        books = Books()
        for event in asyncio.run(events(tmp_path)):
            books.apply(msgspec.to_builtins(event))
        stored_last = [event for batch in after for event in batch.events if isinstance(event, BlockStored)]
        assert books.hashes == {value for event in stored_last for value in event.block_hashes} != set()


def test_one_api_process_publishes_and_another_replaces_it(tmp_path: Path) -> None:
    with serving("--api-processes", "2", *flags(tmp_path)) as server:
        for _ in range(10):
            httpx.post(f"{server.url}/v1/chat/completions", json=LONG_CHAT).raise_for_status()
        assert server.log.count("KV-cache events are published on") == 1
        said = asyncio.run(events(tmp_path))
        assert [type(event) for event in said].count(AllBlocksCleared) == 1
        before = text(said).count(b"hello")
        server.wait_metric("trtllm_kv_event_published_messages_total", len(asyncio.run(batches(tmp_path))))
        publisher(server, tmp_path).kill()
        wait(lambda: server.log.count("KV-cache events are published on") == 2)
        wait(lambda: "an API process is ready again" in server.log)
        other = {**LONG_CHAT, "messages": [{"role": "user", "content": "goodbye " * 40}]}
        httpx.post(f"{server.url}/v1/chat/completions", json=other).raise_for_status()
        said = asyncio.run(events(tmp_path))
        assert [type(event) for event in said].count(AllBlocksCleared) == 1
        assert isinstance(said[0], AllBlocksCleared)
        assert text(said).count(b"hello") == before > 40, "what the engine has from before"
        assert b"goodbye" in text(said)


def publisher(server: ServerProcess, folder: Path) -> psutil.Process:
    """The process that has bound the socket."""
    for child in server.children():
        if any(connection.laddr == f"{folder}/kv" for connection in child.net_connections("unix")):
            return child
    pytest.fail("nobody publishes")
