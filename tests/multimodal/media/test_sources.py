"""Data URLs and local files: their limits, and every way out of the folder."""

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.errors import InvalidMedia, MediaError, UnsupportedMedia
from multimodal.media.limits import MediaLimits
from multimodal.media.loader import MediaLoader
from multimodal.media.sources import _CHUNK, decode_data_url, read_file
from tests.support.media import data_url, image_file, png

PNG = image_file()


@given(st.binary(min_size=1, max_size=64))
def test_data_urls_are_decoded(data: bytes) -> None:
    assert decode_data_url(data_url(data), len(data)) == data
    with pytest.raises(InvalidMedia, match="bytes"):
        decode_data_url(data_url(data), len(data) - 1)


@pytest.mark.parametrize("extra", range(-3, 4))
def test_data_urls_are_decoded_in_pieces(extra: int) -> None:
    data = os.urandom(_CHUNK // 4 * 3 * 2 + extra)
    assert decode_data_url(data_url(data), len(data)) == data


@pytest.mark.parametrize("media_type", ["image/png", "image/JPEG", "image/jpg", "image/webp", "IMAGE/gif"])
def test_the_declared_type_is_looked_at_but_not_believed(media_type: str) -> None:
    assert decode_data_url(data_url(PNG, media_type), 1 << 20) == PNG
    assert decode_data_url(data_url(PNG).replace("data:", "DATA:").replace(";base64", ";BASE64"), 1 << 20) == PNG


LONG = "A" * _CHUNK
BAD_DATA = [
    ("data:text/html;base64,PGI+", UnsupportedMedia), ("data:image/svg+xml;base64,PGI+", UnsupportedMedia),
    ("data:image/jp2;base64,AAAA", UnsupportedMedia), ("data:image/tiff;base64,AAAA", UnsupportedMedia),
    ("data:application/octet-stream;base64,AAAA", UnsupportedMedia), ("data:video/jpeg;base64,AAAA", UnsupportedMedia),
    ("data:image/avif;base64,AAAA", UnsupportedMedia), ("data:image/bmp;base64,AAAA", UnsupportedMedia),
    ("data:,hello", MediaError), ("data:image/png,hello", MediaError), ("data:;base64,AAAA", MediaError),
    ("data:", MediaError),
    ("data:image/png;charset=utf-8;base64,AAAA", MediaError), ("data:image/png;base64;base64,AAAA", MediaError),
    ("data:image/png ;base64,AAAA", MediaError), ("data: image/png;base64,AAAA", MediaError),
    ("data:image/png;base64AAAA", MediaError),
    ("data://image/png;base64,AAAA", MediaError), (f"data:image/{'p' * 100};base64,AAAA", MediaError),
    ("data:image/png;base64,", InvalidMedia), ("data:image/png;base64,A", InvalidMedia),
    ("data:image/png;base64,AAA", InvalidMedia),
    ("data:image/png;base64,AAAA\n", InvalidMedia), ("data:image/png;base64,AA\nA", InvalidMedia),
    ("data:image/png;base64,AA A", InvalidMedia),
    ("data:image/png;base64,AA-_", InvalidMedia), ("data:image/png;base64,AA%3D", InvalidMedia),
    ("data:image/png;base64,AAA%", InvalidMedia),
    ("data:image/png;base64,AA==AAAA", InvalidMedia), ("data:image/png;base64,====", InvalidMedia),
    ("data:image/png;base64,A===", InvalidMedia),
    ("data:image/png;base64,AAA\u00c4", InvalidMedia), ("data:image/png;base64,AA\0A", InvalidMedia),
    ("data:image/png;base64," + LONG[:-4] + "AA==" + "AAAA", InvalidMedia),
    ("data:image/png;base64," + LONG + "AA=A", InvalidMedia),
]  # fmt: skip


@pytest.mark.parametrize(("url", "error"), BAD_DATA, ids=lambda value: ascii(value)[:48])
def test_bad_data_urls_are_refused_and_never_repeated(url: str, error: type[MediaError]) -> None:
    with pytest.raises(MediaError) as caught:
        decode_data_url(url, 1 << 20)
    assert type(caught.value) is error
    assert len(str(caught.value)) <= 160 and "AAA" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [("@@@", "not base64"), ("@@@@", "not base64"), ("AA A", "not base64"), ("AAAAA", "cut off"), ("", "is empty")],
)
def test_invalid_base64_has_messages_of_its_own(data: str, message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        decode_data_url(f"data:image/png;base64,{data}", 1 << 20)


@pytest.mark.parametrize("limit", [1000, 1001, 1002])
def test_a_data_url_beyond_the_limit_is_refused_before_it_is_decoded(limit: int) -> None:
    with pytest.raises(InvalidMedia, match=f"more than {limit} bytes"):
        decode_data_url(
            "data:image/png;base64," + "!" * 1340, limit
        )  # the letters would be refused as they are decoded
    assert len(decode_data_url(data_url(bytes(limit)), limit)) == limit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of media, with secrets beside it."""
    inside = tmp_path / "media"
    (inside / "deep").mkdir(parents=True)
    for path in (inside / "a.png", inside / "deep" / "ü b%.png", tmp_path / "secret.png"):
        path.write_bytes(PNG)
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too" / "a.png").write_bytes(PNG)
    (inside / "within.png").symlink_to("deep/ü b%.png")
    (inside / "out.png").symlink_to(tmp_path / "secret.png")
    (inside / "up").symlink_to("..")
    (inside / "loop.png").symlink_to("loop.png")
    (inside / "broken.png").symlink_to("nowhere.png")
    (inside / "large.png").write_bytes(png(64, 64, 5000))
    (inside / "empty.png").touch()
    os.mkfifo(inside / "pipe.png")
    return inside


@pytest.mark.parametrize("name", ["a.png", "./a.png", "deep/../a.png", "deep/ü b%.png", "within.png", "{folder}/a.png"])
async def test_files_in_the_folder_are_read(folder: Path, name: str) -> None:
    loader = MediaLoader(MediaLimits(local_folder=folder))
    assert (await loader.load(name.format(folder=folder))).data == PNG
    await loader.aclose()


@pytest.mark.parametrize(
    "url", ["file://{folder}/a.png", "FILE://localhost{folder}/a.png?x#y", "file://{folder}/deep/%C3%BC%20b%25.png"]
)
async def test_file_urls_are_read(folder: Path, url: str) -> None:
    loader = MediaLoader(MediaLimits(local_folder=folder))
    assert (await loader.load(url.format(folder=folder))).data == PNG
    await loader.aclose()


OUTSIDE = [
    "../secret.png", "deep/../../secret.png", "{folder}/../secret.png", "file://{folder}/../secret.png", "file://{folder}/%2e%2e/secret.png",
    "file://{folder}/..%2fsecret.png", "file://{folder}/%252e%252e/secret.png", "{folder}-too/a.png", "file://{folder}-too/a.png",
    "out.png",
    "up/secret.png", "up/media/../secret.png", "loop.png", "broken.png", "missing.png", "pipe.png", "deep", ".", "",
    "/", "/etc/passwd",
    "file:///etc/passwd", "file:///proc/self/environ", "file://evil.test{folder}/a.png",
    "file://127.0.0.1{folder}/a.png", "file:a.png",
    "file:/etc/passwd", "file://", "file:////evil.test/share", "a.png\0", "file://{folder}/a.png%00.jpg", "file://{folder}\\a.png",
    "~/a.png", "$HOME/a.png", "\udcff.png", "\ud800.png", "file://{folder}/%ff.png", "x" * 9000, "a/" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("url", OUTSIDE, ids=lambda url: ascii(url)[:40])
async def test_there_is_no_way_out_of_the_folder(folder: Path, url: str) -> None:
    loader = MediaLoader(MediaLimits(local_folder=folder))
    with pytest.raises(MediaError) as caught:
        await loader.load(url.replace("{folder}", str(folder)))
    assert len(str(caught.value)) <= 160 and str(folder) not in str(caught.value)
    await loader.aclose()


@pytest.mark.parametrize(
    "url", ["a.png", "file://{folder}/a.png", "{folder}/a.png", "ftp://x/", "blob:x", "chrome://x", "about:blank"]
)
async def test_without_a_folder_there_are_no_files(folder: Path, url: str) -> None:
    loader = MediaLoader(MediaLimits())
    with pytest.raises(MediaError, match="must be an http, https or data URL"):
        await loader.load(url.replace("{folder}", str(folder)))
    await loader.aclose()


def test_files_have_a_limit_and_leave_nothing_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert read_file("a.png", folder, len(PNG)) == PNG
    with pytest.raises(InvalidMedia, match="more than 4096 bytes"):
        read_file("large.png", folder, 4096)
    for name in ("deep", "pipe.png", "out.png", "a.png/x", "deep/missing.png", "."):
        with pytest.raises(MediaError, match="has no such file"):
            read_file(name, folder, 4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_becomes_a_link_after_it_was_resolved_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write below the folder swaps a step of the path between the look and the opening."""
    resolve = os.path.realpath

    def swapped(path: str | Path, *, strict: bool = False) -> str:
        real = resolve(path, strict=strict)
        if real.endswith(".png"):
            (folder / "deep").rename(folder / "was")
            (folder / "deep").symlink_to(folder.parent)
            (folder.parent / "ü b%.png").write_bytes(b"secret")
        return real

    monkeypatch.setattr(os.path, "realpath", swapped)
    with pytest.raises(MediaError, match="has no such file"):
        read_file("deep/ü b%.png", folder, 1 << 20)


def test_base64_is_what_the_standard_says() -> None:
    every = bytes(range(256))
    assert set(base64.b64encode(every * 3).decode()) >= set("+/")
    assert decode_data_url(data_url(every * 3), 1 << 20) == every * 3
