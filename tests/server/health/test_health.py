"""Readiness and what it depends on: parts by name, the canary on every role, the watchdog of the event loop."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import psutil
import pytest

from engine.errors import EngineAsleep, EngineError, EngineFailure
from engine.kit.audio_file import decode_audio
from engine.media import MediaInput
from engine.types import CANARY_SALT
from server.health.canary import Canary, encoder_probe, tiny_image
from server.health.watchdog import Watchdog
from tests.support.servers import CHAT, ROOT, application, serving
from tests.support.waiting import slowness


async def missing(client: httpx.AsyncClient) -> dict[str, str]:
    """What readiness says is missing."""
    answer = await client.get("/health/ready")
    if answer.status_code == 200:
        assert answer.json() == {"status": "ready"}
        return {}
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"], error["param"]) == (
        503,
        "not_ready",
        "server_error",
        None,
    )
    parts = {part["name"]: part["reason"] for part in error["missing"]}
    assert all(reason in error["message"] for reason in parts.values())
    return parts


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum of a metric's samples; with labels, those of one sample."""
    page = (await client.get("/metrics")).text
    return sum(
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
    )


async def until(condition: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - what is asked has no event
            await asyncio.sleep(0.01)


async def test_readiness_names_all_that_is_missing() -> None:
    async with application() as (client, state):
        replica = state["replica"]
        assert await missing(client) == {}
        replica.checks["kv_events"] = lambda: "The event task has ended."
        assert list(await missing(client)) == ["kv_events"]
        replica.draining = True
        assert list(await missing(client)) == ["draining", "kv_events"]
        replica.draining = False
        service, replica.service = replica.service, None
        assert await missing(client) == {"engine": "The model is loading."}
        replica.service = service
        await service.close()
        assert set(await missing(client)) == {"engine", "kv_events"}


async def test_peers_that_a_role_needs_are_named() -> None:
    here = {"disaggregation_mode": "decode", "internal_secret": "s", "prefill_urls": ("http://127.0.0.1:9",)}
    async with application(False, prefill_fallback="refuse", **here) as (client, state):
        await until(lambda: _loaded(state))
        assert await missing(client) == {"prefill_peers": "No prefill replica answers."}
    async with application(False, prefill_fallback="local", **here) as (client, state):
        await until(lambda: _loaded(state))
        assert await missing(client) == {}, "it computes prompts itself"


async def _loaded(state: dict[str, Any]) -> bool:
    return state["replica"].service is not None


ROLES = [
    {},
    {"disaggregation_mode": "prefill", "internal_secret": "s"},
    {"disaggregation_mode": "decode", "internal_secret": "s", "prefill_urls": ("http://127.0.0.1:9",)},
    {"disaggregation_mode": "encode", "internal_secret": "s"},
]


@pytest.mark.parametrize("settings", ROLES, ids=lambda settings: settings.get("disaggregation_mode", "aggregated"))
async def test_the_canary_runs_on_every_role_and_clients_do_not_notice(settings: dict[str, Any]) -> None:
    """Real requests are made, and none is to be seen in what is measured of users', or reused."""
    async with application(canary_seconds=0.02, **settings) as (client, _):

        async def sung() -> bool:
            return await metric(client, 'trellis_canary_requests_total{outcome="ok"}') >= 3

        await until(sung)
        assert await missing(client) == {}
        for name in ("request_success_total", "prompt_tokens_total", "generation_tokens_total", "encoded_images_total"):
            assert await metric(client, f"trtllm_{name}") == 0
        assert await metric(client, "trtllm_kv_cache_reused_blocks_total") == 0


async def test_a_canary_that_takes_too_long_makes_the_replica_not_ready_and_requests_go_on() -> None:
    async with application(canary_seconds=0.02, canary_timeout_seconds=0.05, fake_token_delay_ms=700) as (client, _):

        async def silent() -> bool:
            return "canary" in await missing(client)

        await until(silent)
        assert await missing(client) == {"canary": "A request of its own took longer than 0.05 s."}
        assert await metric(client, 'trellis_canary_requests_total{outcome="timeout"}') >= 1

        async def shown() -> bool:
            return await metric(client, "trellis_ready") == 0

        await until(shown)
        assert (await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})).status_code == 200


async def test_the_canary_waits_for_idleness_and_goes_on_until_it_succeeds() -> None:
    outcomes: list[str] = []
    failures = [EngineFailure("no"), EngineFailure("no")]
    done = 0

    async def probe() -> None:
        if failures:
            raise failures.pop()

    async def work() -> None:
        nonlocal done
        while True:
            done += 1
            await asyncio.sleep(0.005)

    canary = Canary(probe, lambda: done, lambda: True, outcomes.append)
    working = asyncio.create_task(work())
    running = asyncio.create_task(canary.run(0.05, 1))
    try:
        await asyncio.sleep(0.2)
        assert outcomes == [], "it is not idle"
        working.cancel()
        async with asyncio.timeout(20):
            while not canary.reason():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            working = asyncio.create_task(work())  # somebody else's requests prove nothing now
            while canary.reason():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert outcomes == ["failed", "failed", "ok"]
    finally:
        for task in (working, running):
            task.cancel()
        await asyncio.wait([working, running])


@pytest.mark.parametrize(("error", "known"), [(EngineFailure("aborted"), True), (EngineAsleep("asleep"), False)])
async def test_a_canary_that_a_sleep_ends_counts_for_nothing(error: EngineError, known: bool) -> None:
    outcomes: list[str] = []
    up, probed = True, asyncio.Event()

    async def probe() -> None:
        nonlocal up
        up = not known
        probed.set()
        raise error

    canary = Canary(probe, lambda: 0, lambda: up, outcomes.append)
    running = asyncio.create_task(canary.run(0.001, 1))
    await asyncio.wait_for(probed.wait(), 20)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert (outcomes, canary.reason()) == ([], "")


def test_the_canarys_image_is_one() -> None:
    image = pytest.importorskip("PIL.Image")
    import io  # noqa: PLC0415

    with image.open(io.BytesIO(tiny_image())) as picture:
        picture.load()
        assert (picture.size, picture.mode) == ((32, 32), "RGB")


@pytest.mark.parametrize("audio", [False, True])
async def test_the_canary_of_an_encoder_is_a_file_that_it_takes(audio: bool) -> None:
    sent: list[MediaInput] = []

    async def encode(media: Sequence[MediaInput], prompt: str) -> None:
        sent.extend(media)

    await encoder_probe(encode, audio=audio)()
    assert [file.kind for file in sent] == ["audio" if audio else "image"]
    if audio:
        assert decode_audio(sent[0].data, 1).shape == (1600,)


async def test_the_canarys_salt_is_its_own() -> None:
    """A request for the same token, at every length, finds nothing that a canary has left."""
    assert CANARY_SALT == "trellis-health-check"
    async with application(canary_seconds=0.01) as (client, _):
        await asyncio.sleep(0.1)
        answer = (await client.post("/v1/completions", json={"prompt": [1] * 200, "max_tokens": 1})).json()
        assert answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0


async def test_the_watchdog_sees_a_blocked_loop_in_time_and_says_where(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bool] = []
    watchdog = Watchdog(0.3, seen.append)
    async with watchdog.watching():
        await asyncio.sleep(0.4)
        assert seen == [] and not watchdog.reason(), "it turns"
        _stand_still(seen)
        blocked = watchdog.reason()
        while len(seen) < 2:  # noqa: ASYNC110 - what another thread does
            await asyncio.sleep(0.01)
    assert blocked == "The event loop stood still."
    assert seen == [True, False]
    assert watchdog.reason() == ""
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1 and "_stand_still" in said[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def _stand_still(seen: list[bool]) -> None:
    """Block the loop until that is seen."""
    deadline = time.monotonic() + 30
    while not seen:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_was_stopped_is_not_taken_for_a_blocked_loop() -> None:
    seconds = 0.4 * slowness()
    code = f"""
import asyncio, sys
from server.health.watchdog import Watchdog
async def main():
    async with Watchdog({seconds}, lambda blocked: print("blocked", flush=True)).watching():
        print("watching", flush=True)
        await asyncio.sleep({5 * seconds})
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5 * seconds)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == ""


@pytest.mark.slow
def test_an_engine_that_is_silent_is_noticed_within_the_time() -> None:
    """Its process stands still, its connection stays open."""
    with serving() as server:
        engine = server.child("engine.process.host")
        engine.suspend()
        try:
            began = time.monotonic()
            while (answer := httpx.get(f"{server.url}/health/ready")).status_code == 200:
                assert time.monotonic() - began < 6 * slowness()
                time.sleep(0.1)
            assert [part["name"] for part in answer.json()["error"]["missing"]] == ["engine"]
            assert httpx.get(f"{server.url}/health/live").status_code == 200
        finally:
            engine.resume()
        assert psutil.pid_exists(engine.pid)
