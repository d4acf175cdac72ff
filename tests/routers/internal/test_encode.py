"""Answers and refusals of /encode, and embeddings that are freed however the reader ends."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine.errors import EngineError, QueueFull
from engine.fake.encoder import IMAGE_TOKEN_ID, PLACEHOLDER, FakeEncoder
from engine.kit import handoff
from engine.media import EncodedMedia, MediaInput
from engine.replicas import encode_answers as embeddings
from engine.replicas.encode_answers import decode_answer, fetch
from engine.transfer.base import TransferError
from multimodal.text.tokenizer import byte_tokenizer
from protocol.frames import FrameReader
from protocol.internal import MAX_MEDIA, MEDIA_TYPE, VERSION, EncodeInfo
from routers.internal import leased as leased_answers
from routers.state import ReplicaState
from tests.support.disaggregated import BEARER, SECRET, replica
from tests.support.encode import SIZE, arena, body_of, expected, image, leased, pages
from tests.support.servers import application
from tests.support.waiting import until

ALONE: dict[str, Any] = {"disaggregation_mode": "encode", "internal_secret": SECRET}


async def post(client: httpx.AsyncClient, body: bytes, **headers: str) -> httpx.Response:
    return await client.post("/encode", content=body, headers={**BEARER, "content-type": MEDIA_TYPE, **headers})


async def answer_to(client: httpx.AsyncClient, images: Sequence[MediaInput], **fields: Any) -> list[EncodedMedia]:
    """Of an answer that holds nothing."""
    (found,) = FrameReader(1 << 24).feed((await post(client, body_of(images, **fields))).content)
    assert not found.failed, found.payload
    return await fetch(decode_answer(found.payload), None, 1.0)


async def test_an_encode_replica_encodes_and_has_no_public_routes() -> None:
    async with application(**ALONE) as (client, state):
        described = msgspec.msgpack.decode((await client.get("/encode", headers=BEARER)).content, type=EncodeInfo)
        assert (described.version, described.model, described.backend, described.placeholder) == (
            VERSION,
            "fake",
            "fake",
            PLACEHOLDER,
        )
        images = [image(1), image(2, detail="low"), image(1)]
        assert await answer_to(client, images) == await expected(images)
        for path in ("/v1/models", "/v1/chat/completions"):
            refused = await client.post(path)
            assert refused.status_code == 404 and "an encode replica" in refused.json()["error"]["message"]
        assert (await client.post("/prefill", headers=BEARER)).status_code == 404
        assert "/encode" not in (await client.get("/openapi.json")).text
        assert (await client.get("/health/ready")).status_code == 200
        page = (await client.get("/metrics")).text
        assert (
            'trtllm_encoded_images_total{model_name="fake"} 3.0' in page
            and 'trtllm_encoding_seconds_count{model_name="fake"} 1.0' in page
        )
        assert state["replica"].running == 0


async def test_autoscalers_see_the_requests_that_wait() -> None:
    async def waiting() -> str:
        page = (await client.get("/metrics")).text
        return next(line for line in page.splitlines() if line.startswith("trtllm_encode_requests_waiting")).split()[-1]

    async with application(fake_token_delay_ms=200, **ALONE) as (client, _):
        asking = [asyncio.create_task(answer_to(client, [image(number)])) for number in range(2)]
        seen = set()
        while not all(task.done() for task in asking):
            seen.add(await waiting())
            await asyncio.sleep(0.005)  # nothing in this process yields by itself
        assert "2.0" in seen and await waiting() == "0.0"


async def test_without_the_secret_nobody_encodes() -> None:
    async with application(**ALONE) as (client, _):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await client.get("/encode", headers=headers)).status_code == 401
            assert (await client.post("/encode", headers=headers)).status_code == 401


async def test_a_prefill_replica_encodes_too_and_others_do_not() -> None:
    async with application(disaggregation_mode="prefill", internal_secret=SECRET) as (client, _):
        assert await answer_to(client, [image(1)]) == await expected([image(1)])
    async with application(internal_secret=SECRET) as (client, _):
        assert (await client.get("/encode", headers=BEARER)).status_code == 404


async def test_a_model_without_images_has_no_encoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    async with application(wait=False, model=str(tmp_path), **ALONE) as (_, state):
        await until(lambda: state["replica"].failure)
        assert "takes no images" in state["replica"].failure


def test_the_fake_encoders_text_has_a_token_for_each_row() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(f"a{PLACEHOLDER * 3}b").count(IMAGE_TOKEN_ID) == 3


NO_IMAGE = [MediaInput(b"GIF? no")]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not an encode request"),
        (b"\xc1", 400, "not an encode request"),
        (b"\0\0\0\x01\x80", 400, "missing required field `version`"),
        (body_of(pages(1))[:-1], 400, "its parts are to have"),
        (body_of(pages(1), version=VERSION + 1), 409, f"version {VERSION + 1}; this replica reads version {VERSION}"),
        (body_of(pages(1), model="other"), 409, "'other'; this replica has 'fake'"),
        (body_of([]), 400, f"0 images; from 1 to {MAX_MEDIA}"),
        (body_of(pages(MAX_MEDIA + 1)), 400, f"{MAX_MEDIA + 1} images; from 1 to {MAX_MEDIA}"),
        (body_of([image(1, size=2 << 20)]), 400, "the most is 1048576"),
        (body_of(NO_IMAGE), 400, "cannot be decoded"),
        (bytes(34 << 20), 413, "exceeds"),
    ],
)
async def test_invalid_encode_requests_are_refused_by_name(body: bytes, status: int, message: str) -> None:
    async with application(max_image_mb=1, max_video_mb=1, max_audio_mb=1, max_body_mb=1, **ALONE) as (client, state):
        refused = await post(client, body)
        assert refused.status_code == status and message in refused.json()["error"]["message"]
        assert state["replica"].running == 0


async def test_a_prompts_images_come_together_whatever_they_come_to() -> None:
    images = [image(index, size=(15 << 20) - 100) for index in range(3)]
    async with application(max_image_mb=15, max_images=3, max_body_mb=1, **ALONE) as (client, _):
        assert await answer_to(client, images) == await expected(images)


async def test_other_media_types_are_refused() -> None:
    async with application(**ALONE) as (client, _):
        assert (await post(client, body_of(pages(1)), **{"content-type": "application/json"})).status_code == 415


def held(life: ReplicaState) -> int:
    """Bytes that wait to be read."""
    service: Any = life.service
    return sum(service.store.held)


@pytest.mark.parametrize("method", ["auto", "tcp"])
async def test_embeddings_are_read_from_the_replicas_memory_and_freed_with_the_answer(method: str) -> None:
    images = pages(3)
    async with replica("encode", encode_inline_kb=0) as (url, life), arena(method) as mine:
        async with leased(url, images) as lease:
            assert held(life) == 3 * SIZE and not any(media.data for media in lease.handoff.media)
            assert await fetch(lease.handoff, mine, 5.0) == await expected(images)
            assert held(life) == 3 * SIZE, "until the answer is closed"
        await until(lambda: not held(life))
        assert not mine.taken


async def test_small_embeddings_and_requested_ones_come_within_the_answer() -> None:
    async with replica("encode", encode_inline_kb=2 * SIZE >> 10) as (url, life):
        for count, inline, offered in ((2, False, False), (3, False, True), (3, True, False)):
            async with leased(url, pages(count), inline=inline) as lease:
                assert bool(lease.handoff.offers) is offered and (held(life) > 0) is offered
        await until(lambda: not held(life))


async def test_a_lease_that_ends_by_time_frees_a_moment_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased_answers, "GRACE_SECONDS", 0.3)
    async with replica("encode", encode_inline_kb=0, lease_seconds=0.2) as (url, life), leased(url, pages(2)) as lease:
        await asyncio.wait_for(lease.ended(), 10)
        assert held(life) == 2 * SIZE
        await until(lambda: not held(life))
        await until(lambda: not life.running)


async def test_a_reader_that_dies_frees_what_was_held() -> None:
    async with replica("encode", encode_inline_kb=0) as (url, life):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = body_of(pages(2))
        head = f"POST /encode HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SECRET}\r\ncontent-type: {MEDIA_TYPE}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: held(life))
        writer.transport.abort()  # as the system does for one that was killed
        await until(lambda: not held(life) and not life.running)


async def test_encoding_ends_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased_answers, "ALIVE_SECONDS", 0.05)
    async with replica("encode", fake_token_delay_ms=60_000) as (url, life), httpx.AsyncClient(headers=BEARER) as http:
        request = http.build_request(
            "POST", f"{url}/encode", content=body_of(pages(1)), headers={"content-type": MEDIA_TYPE}
        )
        answer = await http.send(request, stream=True)
        assert await anext(answer.aiter_raw()) == bytes(4), "a sign of life"
        await answer.aclose()
        await until(lambda: not life.running)
        service: Any = life.service
        assert service.encoder.encoded == 0


async def test_without_room_they_come_within_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "ARENA_BYTES", 2 * SIZE)
    monkeypatch.setattr(embeddings, "ROOM_SECONDS", 0.1)
    async with replica("encode", encode_inline_kb=0) as (url, life), leased(url, pages(2)) as first:
        assert first.handoff.offers
        async with leased(url, pages(1)) as second:
            assert await fetch(second.handoff, None, 1.0) == await expected(pages(1))
        monkeypatch.setattr(handoff, "MAX_BYTES", 1 << 20)
        with pytest.raises(QueueFull, match="no room"):
            async with leased(url, pages(1)):
                pass
        assert held(life) == 2 * SIZE


class Broken(FakeEncoder):
    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> list[EncodedMedia]:
        await asyncio.sleep(0.2)
        raise ValueError("a bug")


async def test_a_bug_after_a_sign_of_life_is_a_frame_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased_answers, "ALIVE_SECONDS", 0.05)
    monkeypatch.setattr("engine.fake.encoder.FakeEncoder", Broken)
    async with replica("encode") as (url, life):
        with pytest.raises(EngineError, match="failed on this request"):
            async with leased(url, pages(1)):
                pass
        await until(lambda: not life.running)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"digest": bytes(32)}, "given up before"),
        ({"offset": 1 << 40}, "beyond the peer"),
        ({"offers": (msgspec.convert(["smoke", b""], embeddings.Offer),)}, "offers smoke"),
    ],
)
async def test_embeddings_that_were_read_wrong_are_rejected(wrong: dict[str, Any], complaint: str) -> None:
    async with replica("encode", encode_inline_kb=0) as (url, _), leased(url, pages(1)) as lease, arena() as mine:
        with pytest.raises(TransferError, match=complaint):
            await fetch(msgspec.structs.replace(lease.handoff, **wrong), mine, 5.0)
        assert not mine.taken
