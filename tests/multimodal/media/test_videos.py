"""Videos in chats: fetched and checked as images are, cached by file and frames, refused by the part at fault."""

from typing import Any

import pytest

from engine.fake.encoder import ROWS, FakeEncoder
from engine.media import FrameSampling, MediaSpans
from multimodal.errors import RequestError
from tests.multimodal.media.test_image_limits import PNG, processor
from tests.support.media import data_url, ok, status, world
from tests.support.requests import ask_of, prepare

MP4 = b"\0\0\0\x18ftypisom" + bytes(64)
PARAM = "messages.0.content.1.video_url"


def chat(url: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "Look:"}, {"type": "video_url", "video_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], **fields}


async def test_a_video_is_encoded_once_for_each_choice_of_frames() -> None:
    encoder = FakeEncoder()
    async with processor(encoder) as (made, server):
        server.answers["/a.mp4"] = ok(MP4)
        rows = []
        for fields in (
            {},
            {"media_io_kwargs": {"video": {"num_frames": 3}}},
            {"mm_processor_kwargs": {"num_frames": 3}},
            {"mm_processor_kwargs": {"fps": 2}},
        ):
            for url in ("http://images.test/a.mp4", data_url(MP4, "video/mp4")):
                generation = await prepare(made, chat(url, **fields))
                media = generation.choices[0].request.media
                assert isinstance(media, MediaSpans) and media.spans[0].kind == "video"
                rows.append(media.spans[0].rows)
        assert rows == [ROWS] * 2 + [3 * ROWS] * 4 + [ROWS] * 2
        assert encoder.encoded == 3
        both = chat("http://images.test/a.mp4")
        both["messages"][0]["content"].append({"type": "image_url", "image_url": data_url(PNG)})
        media = (await prepare(made, both)).choices[0].request.media
        assert isinstance(media, MediaSpans) and [span.kind for span in media.spans] == ["video", "image"]


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("http://images.test/missing", "invalid_video_url", "answered with status 404"),
        (
            "http://images.test/a.png",
            "invalid_video_format",
            "formats are MP4, WebM, Matroska and AVI",
        ),
        ("http://images.test/large", "invalid_video", "more than 67108864 bytes"),
        ("http://internal.test/a.mp4", "invalid_video_url", "no address that this server may fetch from"),
        ("file:///etc/passwd", "invalid_video_url", "http, https or data URL"),
        (data_url(PNG), "invalid_video_format", "Supported types are video/mp4"),
        (data_url(b"#EXTM3U\nfile:///etc/passwd", "video/mp4"), "invalid_video_format", "Unsupported video format"),
    ],
)
async def test_refusals_name_the_part(url: str, code: str, said: str) -> None:
    async with processor(FakeEncoder()) as (made, server):
        server.answers |= {"/missing": status(404), "/a.png": ok(PNG), "/large": ok(MP4, length=(64 << 20) + 1)}
        with pytest.raises(RequestError, match=said) as caught:
            await prepare(made, chat(url))
        assert (caught.value.param, caught.value.code) == (PARAM, code)


async def test_the_number_of_videos_is_limited_apart_from_images() -> None:
    async with processor(FakeEncoder()) as (made, _):
        body = chat(data_url(MP4, "video/mp4"))
        body["messages"][0]["content"] *= 5
        with pytest.raises(RequestError, match="4 videos at most") as caught:
            await prepare(made, body)
        assert caught.value.code == "too_many_videos"


async def test_which_frames_are_asked_for() -> None:
    (ref,) = ask_of(chat("http://a/", media_io_kwargs={"video": {"fps": 0.5, "num_frames": 4}})).prompt.media  # type: ignore[union-attr]
    assert (ref.kind, ref.sampling, ref.param) == ("video", FrameSampling(0.5, 4), PARAM)
    for fields, param in (
        ({"mm_processor_kwargs": {"max_pixels": 4}}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"video": {"fps": 1}}, "mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs"),
    ):
        with pytest.raises(RequestError) as caught:
            ask_of(chat("http://a/", **fields))
        assert caught.value.param == param


async def test_a_videos_own_limit_of_bytes() -> None:
    async with world(max_video_bytes=len(MP4), max_image_bytes=10) as w:
        assert (await w.loader.load(data_url(MP4, "video/mp4"), kind="video")).data == MP4  # type: ignore[union-attr]
        with pytest.raises(RequestError, match=f"more than {len(MP4)} bytes"):
            await w.loader.load(data_url(MP4 + b"\0", "video/mp4"), kind="video")
