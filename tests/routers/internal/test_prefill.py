"""Internal routes belong to replicas: the internal secret opens them, and API keys do not. What /prefill answers."""

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import msgspec
import pytest

from engine.kit import handoff
from engine.kit.handoff import decode_handoff
from protocol.frames import FrameReader
from protocol.internal import MEDIA_TYPE, VERSION, PrefillInfo, PrefillRequest, pieces
from routers.internal import leased
from tests.support.disaggregated import BEARER, INFO, SECRET, busy, nothing, request, stats_with
from tests.support.servers import application


async def test_internal_routes_take_the_internal_secret_alone() -> None:
    async with application(api_keys="key", internal_secret="secret") as (client, _):
        for path in ("/prefill", "/encode"):
            for headers in (
                {},
                {"Authorization": "Bearer key"},
                {"Authorization": "secret"},
                {"Authorization": "Bearer secre"},
            ):
                refused = await client.post(path, headers=headers)
                assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert (await client.post(path, headers={"Authorization": "Bearer secret"})).status_code == 404
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer secret"})).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer key"})).status_code == 200


async def test_a_reset_forgets_cached_prompts() -> None:
    async with application(internal_secret=SECRET) as (client, _):
        cached = []
        for reset in (False, False, True):
            if reset:
                assert (await client.post("/reset_prefix_cache")).status_code == 401
                done = await client.post("/reset_prefix_cache", headers=BEARER)
                assert (done.status_code, done.content) == (200, b"")
            body = {"prompt": "long enough for a block " * 9, "max_tokens": 1}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == 0 < cached[1]


async def test_profiles_are_for_operators_and_a_backend_without_one_says_why(tmp_path: Path) -> None:
    async with application(internal_secret=SECRET, api_keys="key") as (client, _):
        for path in ("/start_profile", "/stop_profile"):
            assert (await client.post(path, headers={"Authorization": "Bearer key"})).status_code == 401
            refused = await client.post(path, headers=BEARER)
            assert refused.status_code == 501 and "PROFILE_DIR" in refused.json()["error"]["message"]
    async with application(internal_secret=SECRET, profile_dir=tmp_path / "profiles") as (client, state):
        refused = await client.post("/start_profile", headers=BEARER)
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "not_supported")
        assert "fake engine" in refused.json()["error"]["message"]
        engine = state["replica"].service.engine
        engine.start_profile = engine.stop_profile = AsyncMock()
        assert (await client.post("/start_profile", headers=BEARER)).status_code == 200
        trace = (await client.post("/stop_profile", headers=BEARER)).json()["trace"]
        engine.stop_profile.assert_awaited_with(trace)
        assert Path(trace).parent == tmp_path / "profiles"


async def test_internal_routes_need_a_secret_and_public_ones_only_configured_keys() -> None:
    async with application() as (client, _):
        assert (await client.post("/prefill", headers={"Authorization": "Bearer "})).status_code == 401
        assert (await client.get("/v1/models")).status_code == 200


async def post(client: httpx.AsyncClient, body: bytes, **headers: str) -> httpx.Response:
    return await client.post("/prefill", content=body, headers={**BEARER, "content-type": MEDIA_TYPE, **headers})


def body_of(version: int = VERSION, model: str = "fake", **fields: Any) -> bytes:
    bare, parts = request(**fields).detach()
    raw = msgspec.Raw(msgspec.msgpack.encode(bare))
    return b"".join(pieces(PrefillRequest(version, model, raw, [*map(len, parts)]), parts))


def head_alone(head: dict[str, Any]) -> bytes:
    packed = msgspec.msgpack.encode(head)
    return len(packed).to_bytes(4, "big") + packed


async def test_a_prefill_replica_hands_over_and_has_no_public_routes() -> None:
    async with application(disaggregation_mode="prefill", internal_secret=SECRET) as (client, state):
        described = await client.get("/prefill", headers=BEARER)
        assert msgspec.msgpack.decode(described.content, type=PrefillInfo) == INFO
        answer = await post(client, body_of(max_tokens=1))
        (found,) = FrameReader(1 << 20).feed(answer.content)
        handed = decode_handoff(found.payload)
        assert (answer.status_code, handed.first.finish_reason, handed.state) == (200, "length", b"")
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions")):
            refused = await client.request(method, path)
            assert refused.status_code == 404 and "prefill replica" in refused.json()["error"]["message"]
            assert refused.json()["error"]["code"] == "wrong_replica"
        assert (await client.post("/tokenize")).status_code == 404
        assert "/prefill" not in (await client.get("/openapi.json")).text
        assert (await client.get("/health/ready")).status_code == (await client.get("/metrics")).status_code == 200
        assert state["replica"].running == 0


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not a prefill request"),
        (b"\xc1", 400, "not a prefill request"),
        (b"\0\0\0\x01\x80", 400, "missing required field `version`"),
        (
            head_alone({"version": VERSION, "model": "fake", "request": {"request_id": 5}, "sizes": []}),
            400,
            "Expected `str`",
        ),
        (body_of() + b"more", 400, "its parts are to have 0 bytes, and have 4"),
        (body_of()[:-1], 400, "not a prefill request"),
        (body_of(version=VERSION + 1), 409, f"version {VERSION + 1}; this replica reads version {VERSION}"),
        (body_of(model="other"), 409, "'other'; this replica has 'fake'"),
        (body_of(prompt=(600,)), 400, "from 0 to 511"),
        (bytes(2 << 20), 413, "exceeds 1048576 bytes"),
    ],
)
async def test_invalid_prefill_requests_are_refused_by_name(body: bytes, status: int, message: str) -> None:
    async with application(disaggregation_mode="prefill", internal_secret=SECRET, max_body_mb=1, max_images=0) as (
        client,
        state,
    ):
        refused = await post(client, body)
        assert refused.status_code == status and message in refused.json()["error"]["message"]
        assert state["replica"].running == 0


async def test_other_media_types_and_other_roles_are_refused() -> None:
    async with application(disaggregation_mode="prefill", internal_secret=SECRET) as (client, _):
        assert (await post(client, body_of(), **{"content-type": "application/json"})).status_code == 415
    async with application(internal_secret=SECRET) as (client, _):
        assert (
            (await post(client, body_of())).status_code
            == (await client.get("/prefill", headers=BEARER)).status_code
            == 404
        )


async def test_signs_of_life_and_an_error_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased, "ALIVE_SECONDS", 0.1)
    settings: dict[str, Any] = {"max_batch_size": 1, "queue_timeout_seconds": 0.35}
    async with application(disaggregation_mode="prefill", internal_secret=SECRET, **settings) as (client, state):
        engine = state["replica"].engine
        held = engine.generate(msgspec.structs.replace(request(), prefill_only=True))
        await anext(held)
        answer = await post(client, body_of())
        *alive, last = FrameReader(1 << 20).feed(answer.content)
        assert answer.status_code == 200 and alive == [(b"", False)] * 3
        assert last.failed and b'"code":"queue_timeout"' in last.payload
        await held.aclose()
        await stats_with(engine, nothing)


async def test_a_handoff_that_is_too_large_to_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "MAX_BYTES", 20)
    async with application(disaggregation_mode="prefill", internal_secret=SECRET) as (client, state):
        refused = await post(client, body_of())
        assert refused.status_code == 500 and refused.json()["error"]["code"] == "engine_failure"
        assert "bytes; the most is 20" in refused.json()["error"]["message"]
        await stats_with(state["replica"].engine, nothing)


async def test_an_engine_without_a_sign_of_life_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica lives and could say so for ever, while its engine's process hangs."""
    monkeypatch.setattr(leased, "ALIVE_SECONDS", 0.05)
    async with application(disaggregation_mode="prefill", internal_secret=SECRET, fake_token_delay_ms=60_000) as (
        client,
        state,
    ):
        stream = await busy(state["replica"].engine)
        asking = asyncio.create_task(post(client, body_of()))
        waiting = f'trtllm_prefill_tokens_waiting{{model_name="fake"}} {len(request().prompt_token_ids)}.0'
        while waiting not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - what autoscalers go by
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not asking.done()
        monkeypatch.setattr(type(state["replica"].engine), "healthy", False)
        answer = await asyncio.wait_for(asking, 20)
        assert 'trtllm_prefill_tokens_waiting{model_name="fake"} 0.0' in (await client.get("/metrics")).text
        *alive, last = FrameReader(1 << 20).feed(answer.content)
        assert last.failed and b"not_ready" in last.payload and not any(frame.payload for frame in alive)
        await stream.aclose()
