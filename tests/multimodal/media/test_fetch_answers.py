"""Answers of file servers: every limit ends a fetch, and a broken answer is an error of the request."""

import asyncio
import gzip
from collections.abc import Sequence

import pytest

from multimodal.errors import InvalidMedia, MediaError, MediaTimeout, UnsupportedMedia
from multimodal.media import fetch
from server.http.errors import render
from tests.support.media import PUBLIC, image_file, moved, ok, png, status, world

PNG = image_file()


@pytest.mark.parametrize("code", [201, 204, 206, 304, 400, 401, 403, 404, 429, 500, 503])
async def test_other_answers_than_200_name_the_status_alone(code: int) -> None:
    async with world() as w:
        w.server.answers["/"] = status(
            code, "X-Secret: internal", body=b"" if code in (204, 304) else b"the body is a secret"
        )
        with pytest.raises(MediaError) as caught:
            await w.loader.load("http://images.test/")
        assert str(caught.value) == f"The server of a file answered with status {code}."
        assert render(caught.value).status == 400


async def _endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + png(64, 64))
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


async def _slow_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _slow_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


BROKEN: list[tuple[str, bytes, type[MediaError]]] = [
    ("a longer body than it may be", ok(png(64, 64, 5000)), InvalidMedia),
    ("a length that is too large", ok(PNG, length=5000), InvalidMedia),
    ("a length that is beyond all", b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", MediaError),
    ("a length that is none", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", MediaError),
    ("two lengths", ok(PNG, "Content-Length: 3"), MediaError),
    ("a body that is cut off", ok(PNG, length=len(PNG) + 9), MediaError),
    (
        "chunks without an end",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n" + bytes(9000),
        InvalidMedia,
    ),
    ("broken chunks", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", MediaError),
    ("a gzip bomb", ok(gzip.compress(png(64, 64, 1 << 22))[:4000], "Content-Encoding: gzip"), MediaError),
    ("a small gzip", ok(gzip.compress(PNG), "Content-Encoding: GZIP"), MediaError),
    ("another encoding", ok(PNG, "Content-Encoding: br"), MediaError),
    ("two encodings", ok(PNG, "Content-Encoding: identity, gzip"), MediaError),
    ("gzip in transfer", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", MediaError),
    ("no HTTP", b"220 ftp.test ready\r\n", MediaError),
    ("no answer", b"", MediaError),
    ("headers without an end", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 40000, MediaError),
    ("a page", ok(b"<!doctype html><img src=x>", "Content-Type: image/png"), UnsupportedMedia),
    ("nothing", ok(b"", "Content-Type: image/png"), UnsupportedMedia),
    ("a drawing", ok(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "Content-Type: image/png"), UnsupportedMedia),
    ("a redirect without a target", status(302), MediaError),
]


@pytest.mark.parametrize(("answer", "error"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
async def test_broken_answers_are_errors_of_the_request(answer: bytes, error: type[MediaError]) -> None:
    async with world(max_image_bytes=4096, timeout_seconds=2) as w:
        w.server.answers["/"] = answer
        with pytest.raises(MediaError) as caught:
            await w.loader.load("http://images.test/")
        assert type(caught.value) is error
        assert len(str(caught.value)) <= 160 and "test" not in str(caught.value) and PUBLIC not in str(caught.value)


async def test_an_endless_body_is_broken_off_at_the_limit() -> None:
    async with world(max_image_bytes=1 << 20) as w:
        w.server.answers["/"] = _endless
        with pytest.raises(InvalidMedia, match="more than 1048576 bytes"):
            await w.loader.load("http://images.test/")
        async with asyncio.timeout(20):
            await w.server.broken_off.wait()


@pytest.mark.parametrize("answer", [_slow_body, _slow_head, _silent], ids=["body", "head", "silence"])
async def test_the_whole_fetch_has_one_time_limit(answer: object) -> None:
    async with world(timeout_seconds=0.2) as w:
        w.server.answers |= {"/": answer, "/moved": moved("/")}  # type: ignore[dict-item]
        for path in ("/", "/moved"):
            async with asyncio.timeout(10):
                with pytest.raises(MediaTimeout, match=r"within 0\.2 seconds") as caught:
                    await w.loader.load("http://images.test" + path)
        assert render(caught.value).status == 408 and render(caught.value).headers == {"x-should-retry": "false"}


async def test_a_name_that_nobody_answers_for_is_a_timeout() -> None:
    async with world(timeout_seconds=0.1) as w:

        async def hang(host: str, port: int) -> Sequence[str]:
            await asyncio.sleep(5)
            return []

        w.loader._fetcher._resolve = hang  # type: ignore[assignment]
        with pytest.raises(MediaTimeout):
            await w.loader.load("http://images.test/")


async def test_formats_are_answered_with_415() -> None:
    async with world() as w:
        w.server.answers["/"] = ok(b"BM" + bytes(100))
        with pytest.raises(UnsupportedMedia) as caught:
            await w.loader.load("http://images.test/")
        answer = render(caught.value)
        assert answer.status == 415 and b'"invalid_image_format"' in answer.body


async def test_a_body_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much time there is for one that comes at a fair pace."""
    monkeypatch.setattr(fetch, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(fetch, "MIN_RATE", 1 << 30)
    async with world(timeout_seconds=60) as w:
        w.server.answers["/a.png"] = _slow_body
        async with asyncio.timeout(20):
            with pytest.raises(MediaTimeout, match="bytes a second"):
                await w.loader.load("http://images.test/a.png")
        await w.server.broken_off.wait()
