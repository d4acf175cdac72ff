"""/v1/images on a fake pipeline: requests and answers, owners of files, and refusals."""

import asyncio
import io
import json
import struct
import zlib
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from engine.errors import EngineFailure
from protocol.visual import CompletedImage, ImagesAnswer, PartialImage
from routers.database import StoreUnavailable
from routers.errors import NotFound
from routers.state import VisualService
from routers.visual import media as media_module
from routers.visual.images import FRAMING
from routers.visual.media import MediaStore
from tests.support.servers import application
from tests.support.waiting import slowness, until

NEW, CHANGED = "/v1/images/generations", "/v1/images/edits"
BODY = {"model": "fake", "prompt": "a red circle"}
KEYS: dict[str, Any] = {"api_keys": ("one", "two")}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(modality="visual", cache_dir=tmp_path) as (client, _):
        yield client


def picture(size: tuple[int, int] = (24, 24), mode: str = "RGB", format_: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, format_)
    return file.getvalue()


def refusal(answer: httpx.Response, status: int = 400) -> tuple[str | None, str | None]:
    """The field and the code of a refusal."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    return error["param"], error["code"]


async def test_pictures_come_with_their_seeds_and_usage(client: httpx.AsyncClient) -> None:
    ignored = {"user": "u", "moderation": "low", "style": "vivid", "background": "opaque"}
    answer = await client.post(NEW, json=BODY | {"n": 3, "seed": 7, "size": "32x16"} | ignored)
    found = ImagesAnswer.model_validate(answer.json())
    assert [one.seed for one in found.data] == [7, 8, 9]
    for one in found.data:
        with Image.open(io.BytesIO(b64decode(one.b64_json or ""))) as image:
            assert (image.format, image.size) == ("PNG", (32, 16))
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 6, 9)
    again = await client.post(NEW, json=BODY | {"seed": 8, "size": "32x16"})
    assert again.json()["data"][0]["b64_json"] == found.data[1].b64_json
    assert {one["seed"] for one in (await client.post(NEW, json=BODY | {"n": 2})).json()["data"]} != {7, 8}


async def test_a_url_leads_to_the_file(client: httpx.AsyncClient) -> None:
    for name in ("png", "webp", "jpeg"):
        body = BODY | {"response_format": "url", "output_format": name, "output_compression": 40, "seed": 1}
        answer = (await client.post(NEW, json=body)).json()
        assert answer["output_format"] == name
        file = await client.get(answer["data"][0]["url"])
        assert file.headers["content-type"] == f"image/{name}"
        with Image.open(io.BytesIO(file.content)) as image:
            assert image.format == name.upper()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x" * 40_000}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": 11}, "n"),
    ({"size": "big"}, "size"),
    ({"size": "0x64"}, "size"),
    ({"size": "63x64"}, "size"),
    ({"size": "8192x8192"}, "size"),
    ({"size": "8x16384"}, "size"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"num_inference_steps": 201}, "num_inference_steps"),
    ({"guidance_scale": -1}, "guidance_scale"),
    ({"seed": -1}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"response_format": "file"}, "response_format"),
    ({"output_format": "gif"}, "output_format"),
    ({"output_compression": 101}, "output_compression"),
    ({"stream": True, "n": 2}, "n"),
    ({"stream": True, "response_format": "url"}, "response_format"),
    ({"partial_images": 4}, "partial_images"),
    ({"background": "transparent"}, "background"),
    ({"quality": "best"}, "quality"),
]


async def test_a_refusal_names_the_field(client: httpx.AsyncClient) -> None:
    for fields, param in WRONG:
        assert refusal(await client.post(NEW, json=BODY | fields))[0] == param, fields
    assert refusal(await client.post(NEW, json=BODY | {"model": "dall-e-3"}), 404) == ("model", "model_not_found")
    assert refusal(await client.post(NEW, json={"model": "fake"}))[0] == "prompt"
    refusal(await client.post(NEW, json=BODY | {"prompt": "refuse"}))
    assert refusal(await client.post(NEW, json=BODY | {"prompt": "fail"}), 500)[1] == "engine_failure"


async def test_quality_chooses_the_steps(tmp_path: Path) -> None:
    async with application(modality="visual", cache_dir=tmp_path, visual_steps=10) as (client, state):
        service: VisualService = state["replica"].service
        for quality, steps in (("low", 5), ("auto", 10), ("hd", 15)):
            before = (await anext(aiter(service.engine.stats()))).steps
            await client.post(NEW, json=BODY | {"quality": quality})
            assert (await anext(aiter(service.engine.stats()))).steps - before == steps


async def test_default_steps_keep_to_the_limit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"visual_steps": 10, "visual_max_steps": 8}
    async with application(modality="visual", cache_dir=tmp_path, **settings) as (client, state):
        service: VisualService = state["replica"].service
        assert (await client.post(NEW, json=BODY | {"quality": "hd"})).status_code == 200
        assert (await anext(aiter(service.engine.stats()))).steps == 8


async def test_a_picture_is_changed(client: httpx.AsyncClient) -> None:
    files = {"image": ("a.png", picture(), "image/png")}
    form = {"prompt": "blue", "model": "fake", "seed": "1", "strength": "0.5"}
    plain = await client.post(CHANGED, data=form, files=files)
    found = ImagesAnswer.model_validate(plain.json())
    assert found.size == "24x24", "as large as the one to change"
    assert found.usage.input_tokens_details.image_tokens == 2
    masked = await client.post(CHANGED, data=form, files=files | {"mask": ("m.png", picture(mode="RGBA"), "image/png")})
    assert masked.json()["data"][0]["b64_json"] != found.data[0].b64_json


def bomb() -> bytes:
    """A PNG of a gigapixel, a few bytes long."""
    head = struct.pack(">IIBBBBB", 32768, 32768, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


async def test_files_that_cannot_be_changed(client: httpx.AsyncClient) -> None:
    cases: list[tuple[dict[str, bytes], int, str]] = [
        ({}, 400, "image"),
        ({"image": b"no picture"}, 415, "image"),
        ({"image": bomb()}, 400, "image"),
        ({"image": picture(), "mask": picture((16, 16))}, 400, "mask"),
        ({"image": picture(), "mask": b"GIF89a"}, 400, "mask"),
    ]
    for files, status, param in cases:
        given = {name: (name, data, "image/png") for name, data in files.items()} or {"other": ("o", b"", "text/plain")}
        answer = await client.post(CHANGED, data={"prompt": "blue", "model": "fake"}, files=given)
        assert refusal(answer, status)[0] == param
    refusal(await client.post(CHANGED, json=BODY), 415)


async def test_files_belong_to_a_key(tmp_path: Path) -> None:
    async with application(modality="visual", cache_dir=tmp_path, **KEYS) as (client, _):
        answer = await client.post(NEW, json=BODY | {"response_format": "url"}, headers=key("one"))
        url = answer.json()["data"][0]["url"]
        assert (await client.get(url, headers=key("one"))).status_code == 200
        assert refusal(await client.get(url, headers=key("two")), 404) == ("file", "file_not_found")
        assert (await client.get(url)).status_code == 401
        assert refusal(await client.get("/v1/images/files/..%2Fmedia.sqlite", headers=key("one")), 404)


async def test_files_outlive_a_restart_and_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with application(modality="visual", cache_dir=tmp_path) as (client, _):
        url = (await client.post(NEW, json=BODY | {"response_format": "url"})).json()["data"][0]["url"]
    async with application(modality="visual", cache_dir=tmp_path) as (client, _):
        assert (await client.get(url)).status_code == 200
    async with application(modality="visual", cache_dir=tmp_path, media_store_hours=1e-9) as (client, _):
        assert (await client.get(url)).status_code == 404
        await until(lambda: not stored(tmp_path, "*.png"))


async def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, 100, 60)
    first, second = await store.put("me", b"1" * 60, "png"), await store.put("me", b"2" * 60, "png")
    with pytest.raises(NotFound):
        await store.get("me", first.name)
    assert (await store.get("me", second.name)).path.read_bytes() == b"2" * 60
    with pytest.raises(EngineFailure, match="MEDIA_STORE_MB"):
        await store.put("me", b"3" * 101, "png")
    await store.close()


def stored(folder: Path, pattern: str) -> list[Path]:
    return list(folder.rglob(pattern))


async def test_half_a_file_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MediaStore(tmp_path, 100, 60)
    monkeypatch.setattr(media_module.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(StoreUnavailable):
        await store.put("me", b"1", "png")
    assert [path for path in stored(tmp_path, "*") if path.parent.name == "files"] == []
    (tmp_path / "files" / "a.partial").write_bytes(b"of a process that has ended")
    monkeypatch.setattr(media_module, "_STRAY_SECONDS", -1.0)
    await store.clean()
    assert not stored(tmp_path, "*.partial"), "what was left is removed"
    await store.close()


async def test_cleaning_goes_on_after_the_store_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, again, tries = MediaStore(tmp_path, 100, 60), asyncio.Event(), []

    async def clean() -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise StoreUnavailable("locked")
        again.set()

    monkeypatch.setattr(store, "clean", clean)
    cleaning = asyncio.create_task(media_module.clean_for_ever(store, 0.0))
    waiting = asyncio.create_task(again.wait())
    await asyncio.wait([cleaning, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=20 * slowness())
    assert again.is_set()
    cleaning.cancel()
    await asyncio.wait([cleaning])


async def test_a_client_that_leaves_ends_the_work(tmp_path: Path) -> None:
    async with application(modality="visual", cache_dir=tmp_path, fake_token_delay_ms=5) as (client, state):
        service: VisualService = state["replica"].service
        body = BODY | {"num_inference_steps": 200}
        asking = asyncio.create_task(client.post(NEW, json=body))
        news = aiter(service.engine.stats())
        while (await anext(news)).steps < 2:
            pass
        asking.cancel()
        while (now := await anext(news)).aborted < 1:
            pass
        assert now.steps < 200


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    assert answer.status_code == 200, answer.text
    *events, last = answer.text.strip().split("\n\n")
    found = [event.split("\n") for event in events]
    loaded = [json.loads(data.removeprefix("data: ")) for _, data in found]
    assert [name for name, _ in found] == [f"event: {event['type']}" for event in loaded]
    assert last == "data: [DONE]"
    return loaded


async def test_pictures_are_streamed_unfinished(client: httpx.AsyncClient) -> None:
    asked = BODY | {"seed": 7, "size": "32x16"}
    (whole,) = (await client.post(NEW, json=asked)).json()["data"]
    body = asked | {"stream": True, "partial_images": 3, "num_inference_steps": 3}  # no preview of the last step
    *previews, last = events_of(await client.post(NEW, json=body))
    assert [PartialImage.model_validate(event).partial_image_index for event in previews] == [0, 1]
    assert {event["type"] for event in previews} == {"image_generation.partial_image"}
    assert previews[0]["b64_json"] != (completed := CompletedImage.model_validate(last)).b64_json
    assert (completed.b64_json, completed.seed, completed.usage.total_tokens) == (whole["b64_json"], 7, 5)
    (only,) = events_of(await client.post(NEW, json=asked | {"stream": True}))
    assert only["type"] == "image_generation.completed"
    form = {"prompt": "blue", "model": "fake", "stream": "true", "partial_images": "1"}
    changed = events_of(await client.post(CHANGED, data=form, files={"image": ("a.png", picture(), "image/png")}))
    assert [event["type"] for event in changed] == ["image_edit.partial_image", "image_edit.completed"]
    refusal(await client.post(NEW, json=body | {"prompt": "refuse", "partial_images": 0}))
    assert FRAMING.event(b'{"error":{}}') == b'event: error\ndata: {"type":"error","error":{}}\n\n'


async def test_a_request_has_a_deadline(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"fake_token_delay_ms": 20, "request_timeout_seconds": 0.05}
    async with application(modality="visual", cache_dir=tmp_path, **settings) as (client, _):
        for stream in (False, True):
            answer = await client.post(NEW, json=BODY | {"num_inference_steps": 200, "stream": stream})
            assert refusal(answer, 504)[1] == "deadline_exceeded"


async def test_routes_say_what_the_model_makes(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json={})
    assert answer.status_code == 404
    assert "makes pictures" in answer.text
    runtime = (await client.get("/v1/models")).json()["data"][0]["runtime"]
    assert (runtime["pipeline"], runtime["makes"]) == ("FakePipeline", ["image", "video"])
    assert runtime["takes"] == ["text", "image"]
    document = (await client.get("/openapi.json")).json()
    assert {"/v1/images/generations", "/v1/images/edits", "/v1/videos"} <= document["paths"].keys()
    assert "prompt" in document["components"]["schemas"]["ImageEditRequest"]["properties"]
    async with application() as (text, _):
        answer = await text.post(NEW, json=BODY)
        assert answer.status_code == 404
        assert "makes text" in answer.text
        takes = (await text.get("/v1/models")).json()["data"][0]["runtime"]["takes"]
        assert takes == ["text", "image", "video"]
