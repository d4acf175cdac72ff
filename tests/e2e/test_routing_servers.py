"""A router before replicas in processes of their own, which are killed under load and come back."""

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import yaml

from engine.process.sockets import free_port
from server.settings import Settings
from tests.support.servers import ROOT, ServerProcess
from tests.support.waiting import slowness

STREAMS = 12


class Replicas:
    """Three servers at ports that they keep, and a router before them."""

    def __init__(self) -> None:
        self.ports = [(free_port(), free_port(), free_port()) for _ in range(3)]
        self.servers = [self._start(place) for place in range(3)]
        for server in self.servers:
            server.wait_ready()
        self.router = ServerProcess(
            *(
                "--disaggregation-mode",
                "router",
                "--route-urls",
                ",".join(f"http://127.0.0.1:{port}" for port, _, _ in self.ports),
            ),
            *("--route-events", ",".join(f"tcp://127.0.0.1:{port}" for _, port, _ in self.ports)),
            *("--route-replays", ",".join(f"tcp://127.0.0.1:{port}" for _, _, port in self.ports)),
        )
        self.router.wait_ready()

    def _start(self, place: int) -> ServerProcess:
        port, events, replay = self.ports[place]
        sockets = (
            "--kv-events-endpoint",
            f"tcp://127.0.0.1:{events}",
            "--kv-events-replay-endpoint",
            f"tcp://127.0.0.1:{replay}",
        )
        return ServerProcess("--port", str(port), "--publish-kv-events", "true", *sockets, "--fake-token-delay-ms", "4")

    def kill(self, place: int) -> None:
        for process in (*self.servers[place].children(), self.servers[place].process):
            process.send_signal(signal.SIGKILL)
        self.servers[place].wait(10)

    def restart(self, place: int) -> None:
        self.servers[place] = self._start(place)

    def close(self) -> None:
        running = [server for server in (self.router, *self.servers) if server.process.poll() is None]
        for server in running:
            server.process.terminate()
        for server in running:
            server.wait(20)


@contextmanager
def replicas() -> Iterator[Replicas]:
    with ExitStack() as stack:
        found = Replicas()
        stack.callback(found.close)
        yield found


class Load:
    """Streams one after the other on several connections; `outcomes` says how each ended, and at which replica."""

    def __init__(self, url: str) -> None:
        self.outcomes: list[tuple[str, str]] = []
        self.slowest = 0.0
        self._url = url
        self._over = asyncio.Event()

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=10) as client:
            await asyncio.gather(*(self._stream(client, number) for number in range(STREAMS)))

    def stop(self) -> None:
        self._over.set()

    async def more(self, count: int, replica: str = "") -> None:
        """Return once so many have ended rightly from now on, at that replica."""
        async with asyncio.timeout(60):
            wanted = self._right(replica) + count
            while self._right(replica) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def _right(self, replica: str) -> int:
        return sum(kind == "right" and replica in ("", place) for kind, place in self.outcomes)

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        for turn in range(1 << 20):
            if self._over.is_set():
                return
            started = time.monotonic()
            self.outcomes.append(await self._one(client, f"{number} says {turn}: {'abc' * 30}"))
            self.slowest = max(self.slowest, time.monotonic() - started)

    async def _one(self, client: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
        body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "stream": True}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            place = answer.headers.get("x-trellis-replica", "")
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]
                return ("refused" if answer.status_code == 503 and error["message"] else f"{answer.status_code}"), place
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return ("right" if text == prompt[:20] else f"wrong: {text}"), place
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return ("cut" if prompt.startswith(text) and event["error"]["message"] else "vague"), place
                    text += event["choices"][0]["text"]
        return "the stream has ended without a word", place


@pytest.fixture(scope="module")
def cluster() -> Iterator[Replicas]:
    with replicas() as found:
        yield found


async def test_killed_replicas_cost_no_more_than_their_streams(cluster: Replicas) -> None:
    load = Load(cluster.router.url)
    running = asyncio.create_task(load.run())
    await load.more(40)
    cluster.kill(1)
    await load.more(100)
    cut = Counter(kind for kind, _ in load.outcomes)["cut"]
    assert cut <= STREAMS
    cluster.restart(1)
    await load.more(5, "1")
    load.stop()
    await running
    assert {kind for kind, _ in load.outcomes} <= {"right", "cut"}, Counter(load.outcomes)
    assert load.slowest < 5 * slowness()


def test_without_any_replica_requests_are_refused_until_one_is_back(cluster: Replicas) -> None:
    for place in range(3):
        cluster.kill(place)
    started = time.monotonic()
    answer = httpx.post(f"{cluster.router.url}/v1/completions", json={"prompt": "hello"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert time.monotonic() - started < 3 * slowness()
    cluster.restart(2)
    cluster.servers[2].wait_ready()
    deadline = time.monotonic() + 30
    while httpx.get(f"{cluster.router.url}/health/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (
        httpx.post(f"{cluster.router.url}/v1/completions", json={"prompt": "hello"}).headers["x-trellis-replica"] == "2"
    )


def test_the_composed_router_finds_its_replicas_and_their_events() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    replica, router = services["routed"], services["router"]

    def settings_of(service: dict[str, Any]) -> Settings:
        given = {name.lower(): value for name, value in service["environment"].items() if "$" not in value}
        return Settings(**{name: value for name, value in given.items() if name in Settings.model_fields})

    settings = settings_of(router)
    assert settings.route_urls == ("dns+http://routed:8000",)
    published = settings_of(replica)
    assert published.publish_kv_events
    assert published.kv_events_endpoint.endswith(f":{settings.route_events_port}")
    assert published.kv_events_replay_endpoint.endswith(f":{settings.route_replay_port}")
    assert replica["profiles"] == router["profiles"] == ["router"]
    assert replica["networks"] == router["networks"]
