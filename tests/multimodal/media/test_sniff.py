"""Formats and sizes from headers: as Pillow has them for real files, and refused for those that only pretend."""

import io
import struct
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.kit.image_file import decode
from engine.media import MediaInput
from multimodal.errors import InvalidMedia, MediaError, UnsupportedMedia
from multimodal.media.sniff import MAX_SIDE, MIN_SIDE, check_image
from tests.support.media import image_file, png, png_chunk
from tests.support.waiting import slowness

PIXELS = 64_000_000
FILES = {
    "png": image_file(),
    "jpeg": image_file("JPEG"),
    "progressive": image_file("JPEG", (333, 4), progressive=True),
    "jpeg with exif": image_file("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0", comment=b"\xff\xc0"),
    "gif": image_file("GIF", (5, 700), comment=b"x" * 2000),
    "webp": image_file("WEBP", (17, 91)),
    "lossless": image_file("WEBP", (1000, 4), lossless=True),
    "extended": image_file("WEBP", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"),
}


def _animated(form: str) -> bytes:
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, form, save_all=True, append_images=frames[1:], duration=10)
    return buffer.getvalue()


ANIMATED = {form: _animated(form) for form in ("GIF", "WEBP", "PNG")}


@pytest.mark.parametrize(
    "data", [*FILES.values(), *ANIMATED.values()], ids=[*FILES, *(f"animated {form}" for form in ANIMATED)]
)
def test_sizes_are_those_that_pillow_decodes(data: bytes) -> None:
    with Image.open(io.BytesIO(data)) as image:
        assert check_image(data, PIXELS) == image.size


@pytest.mark.parametrize("order", ["<", ">"])
def test_photos_are_as_large_as_decoded_upright(order: str) -> None:
    """Their sides are swapped by the half of EXIF's orientations that turn them."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    tiffs = [head + struct.pack(f"{order}IHHHIHH", 8, 1, 0x0112, 3, 1, turned, 0) + bytes(4) for turned in range(10)]
    for tiff in tiffs:
        photo = image_file("JPEG", (40, 20), exif=b"Exif\0\0" + tiff)
        assert check_image(photo, PIXELS) == decode(MediaInput(photo), PIXELS).size, tiff


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
@pytest.mark.parametrize("size", [(MIN_SIDE, MIN_SIDE), (16383, 4), (4, 16383)])
def test_sizes_at_the_edge(form: str, size: tuple[int, int]) -> None:
    assert check_image(image_file(form, size), size[0] * size[1]) == size
    with pytest.raises(InvalidMedia, match="pixels"):
        check_image(image_file(form, size), size[0] * size[1] - 1)


@pytest.mark.parametrize(
    "size",
    [(1, 1), (3, 100), (100, 1), (0, 100), (100, 0), (MAX_SIDE + 1, 4), (4, 1 << 31), ((1 << 32) - 1, (1 << 32) - 1)],
)
def test_sides_beyond_the_limits_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidMedia, match=str(max(size))):
        check_image(png(*size), 1 << 70)


def _jpeg(*segments: bytes) -> bytes:
    return b"\xff\xd8" + b"".join(segments) + b"\xff\xd9"


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body


def _frame(width: int, height: int, marker: int = 0xC0) -> bytes:
    return _segment(marker, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")


SCAN = _segment(0xDA, b"\1\1\0\0\x3f\0") + b"\0"
IHDR = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0))


def _gif(screen: tuple[int, int], frame: tuple[int, int, int, int], before: bytes = b"") -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", *screen, 0, 0, 0) + before + b"\x2c" + struct.pack("<HHHHB", *frame, 0)


def _webp(kind: bytes, body: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 12 + len(body)) + b"WEBP" + kind + struct.pack("<I", len(body)) + body


BOMBS = {
    "png": png(40000, 40000),
    "png with two headers": png(64, 64)
    .replace(b"IDAT", b"tEXt")
    .replace(png_chunk(b"IEND", b""), IHDR + png_chunk(b"IDAT", b"")),
    "png of zeros": png(40000, 40000)[:33]
    + png_chunk(b"IDAT", zlib.compress(bytes(1 << 22)))
    + png_chunk(b"IEND", b""),
    "jpeg": _jpeg(_frame(65500, 65500), SCAN),
    "jpeg with two frames": _jpeg(_frame(64, 64), _frame(65500, 65500), SCAN),
    "jpeg with a thousand scans": _jpeg(_frame(7000, 7000, 0xC2), SCAN * 1000),
    "gif": _gif((65535, 65535), (0, 0, 4, 4)),
    "gif whose frame is larger than its screen": _gif((10, 10), (0, 0, 65535, 65535)),
    "gif whose frame lies far out": _gif((10, 10), (65000, 65000, 10, 10), b"\x21\xfe\x03abc\0"),
    "webp": _webp(b"VP8X", b"\x10\0\0\0" + b"\x80\xbb\0\x80\xbb\0"),
    "webp, lossy": _webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 0x3FFF, 0x3FFF) + bytes(9)),
    "webp, lossless": _webp(b"VP8L", b"\x2f\xff\xff\xff\x0f" + bytes(9)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_decompression_bombs_are_refused_by_their_header(name: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidMedia):
        check_image(BOMBS[name], PIXELS)
    assert time.process_time() - started < 0.5 * slowness()


OTHER_FORMATS = {
    "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "jpeg 2000 stream": b"\xff\x4f\xff\x51",
    "tiff": b"II*\0",
    "bmp": b"BM",
    "icon": b"\0\0\1\0",
    "photoshop": b"8BPS",
    "avif": b"\0\0\0\x20ftypavif",
    "svg": b"<svg xmlns=",
    "pdf": b"%PDF-1.7",
    "postscript": b"%!PS-Adobe-3.0 EPSF",
    "wave": b"RIFF\0\0\0\0WAVEfmt ",
    "a portable pixmap": b"P6 40000 40000 255\n",
    "pickle": b"\x80\x04\x95",
    "zip": b"PK\3\4",
    "an old gif": b"GIF88a",
    "html before a png": b"<b>\x89PNG\r\n\x1a\n",
    "text": b"hello",
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_formats_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedMedia, match="PNG, JPEG, WEBP and GIF"):
        check_image(OTHER_FORMATS[name] + bytes(100), PIXELS)


BROKEN = {
    "png without a header": b"\x89PNG\r\n\x1a\n" + png_chunk(b"IDAT", b"x" * 20),
    "png without a picture": b"\x89PNG\r\n\x1a\n"
    + IHDR[:8]
    + struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0)
    + b"crc!"
    + png_chunk(b"IEND", b""),
    "png of countless chunks": png(64, 64)[:33] + png_chunk(b"tEXt", b"") * 100_000,
    "jpeg without a frame": _jpeg(SCAN),
    "jpeg without a scan": _jpeg(_frame(64, 64)),
    "arithmetic jpeg": _jpeg(_frame(64, 64, 0xC9), SCAN),
    "lossless jpeg": _jpeg(_frame(64, 64, 0xC3), SCAN),
    "jpeg with a segment of no length": b"\xff\xd8\xff\xe0\0\0" + bytes(50),
    "jpeg of fills": b"\xff\xd8" + b"\xff" * 100_000,
    "gif of countless extensions": _gif((64, 64), (0, 0, 64, 64), b"\x21\xfe\0" * 100_000),
    "gif of countless blocks": _gif((64, 64), (0, 0, 64, 64), b"\x21\xfe" + b"\1x" * 100_000 + b"\0"),
    "gif without a frame": b"GIF89a" + struct.pack("<HHBBB", 64, 64, 0, 0, 0) + b";" + bytes(20),
    "webp of another kind": _webp(b"ANIM", bytes(30)),
    "webp, lossy, without its mark": _webp(b"VP8 ", bytes(30)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers_are_refused(name: str) -> None:
    with pytest.raises(InvalidMedia, match="header is broken"):
        check_image(BROKEN[name], PIXELS)


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_cut_off_in_their_header_are_refused(name: str) -> None:
    for length in range(30):
        with pytest.raises(MediaError):
            check_image(FILES[name][:length], PIXELS)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted({**FILES, **BOMBS, **BROKEN}.items())), st.data())
def test_damaged_files_raise_nothing_else(file: tuple[str, bytes], data: st.DataObject) -> None:
    damaged = bytearray(file[1][:4000])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(len(damaged), 200) - 1))] = data.draw(st.integers(0, 255))
    try:
        width, height = check_image(bytes(damaged), PIXELS)
    except MediaError:
        return
    assert min(width, height) >= MIN_SIDE and width * height <= PIXELS
