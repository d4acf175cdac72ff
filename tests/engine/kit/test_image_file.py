"""Files become upright RGB pixels, or are refused in our words, whatever they hold."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, ImageSequence

from engine.config import EncoderConfig
from engine.embedded.vision.batches import BatchEncoder
from engine.errors import EngineError, InvalidRequest
from engine.kit.image_file import LOW_DETAIL, decode
from engine.media import EncodedMedia, MediaInput
from tests.support.vision_models import build_llava, image, image_bytes

MAX_PIXELS = 1_000_000


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> BatchEncoder:
    folder = build_llava(tmp_path_factory.mktemp("llava"))
    return BatchEncoder(EncoderConfig(model=str(folder), dtype="float32", max_image_pixels=MAX_PIXELS))


def outcomes(encoder: BatchEncoder, *files: bytes) -> list[EncodedMedia | EngineError]:
    found = dict(pair for pairs in encoder.encode([MediaInput(file) for file in files]) for pair in pairs)
    return [found[index] for index in range(len(files))]


def refusal(encoder: BatchEncoder, file: bytes) -> str:
    """The message of the refusal, after which the next image is encoded."""
    good = image_bytes()
    before, outcome, after = outcomes(encoder, good, file, good)
    assert isinstance(before, EncodedMedia) and before == after
    assert isinstance(outcome, InvalidRequest) and outcome.param == "image"
    return str(outcome)


def saved(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def pixels(file: bytes, detail: Any = "auto") -> np.ndarray[Any, Any]:
    picture = decode(MediaInput(file, detail), MAX_PIXELS)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def png_of(width: int, height: int) -> bytes:
    """The beginning of an image that says it is so large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")


BAD = {
    "nothing": b"",
    "text": b"this is no image",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "bmp": saved(image(), "BMP"),
    "tiff": saved(image(), "TIFF"),
    "ppm": saved(image(), "PPM"),
    "png header alone": image_bytes()[:30],
    "truncated png": image_bytes(200, 200)[:-300],
    "truncated jpeg": image_bytes(200, 200, form="JPEG")[:-2000],
    "truncated webp": image_bytes(200, 200, form="WEBP")[:-200],
    "truncated gif": image_bytes(200, 200, form="GIF")[:-2000],
    "damaged png": image_bytes(200, 200)[:120] + bytes(200) + image_bytes(200, 200)[320:],
}
BOMBS = {
    "png": png_of(30_000, 30_000),
    "png of the most pixels": png_of(2**31 - 1, 2**31 - 1),
    "png just too large": image_bytes(1001, 1000),
    "png twice too large": image_bytes(2001, 1000),
    "gif": b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\x00\x00\x00\x00\xff\xff\xff\xff\x00\x08\x00;",
}


@pytest.mark.parametrize("kind", BAD)
def test_files_that_are_not_images_are_refused_with_our_message(encoder: BatchEncoder, kind: str) -> None:
    assert refusal(encoder, BAD[kind]) in (
        "the image cannot be read: it must be a whole PNG, JPEG, WEBP or GIF file",
        "the image is damaged or incomplete",
    )


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_are_refused_before_they_are_decoded(encoder: BatchEncoder, kind: str) -> None:
    assert "has more than 1000000 pixels" in refusal(encoder, BOMBS[kind])


def test_an_image_all_too_long_is_refused(encoder: BatchEncoder) -> None:
    assert "more than 200 times" in refusal(encoder, image_bytes(2010, 10))
    assert all(
        isinstance(outcome, EncodedMedia) for outcome in outcomes(encoder, image_bytes(2000, 10), image_bytes(1, 200))
    )


PIXELS = [
    *(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
    *(("JPEG", mode) for mode in ("L", "RGB", "CMYK", "YCbCr")),
    *(("WEBP", mode) for mode in ("RGB", "RGBA")),
    *(("GIF", mode) for mode in ("1", "L", "P")),
]


@pytest.mark.parametrize(("form", "mode"), PIXELS)
def test_every_kind_of_pixel_becomes_rgb(form: str, mode: str) -> None:
    down, right = np.mgrid[0:120:2, 0:240:4]
    picture = Image.fromarray(np.stack([down * 2, right, 255 - right], -1).astype(np.uint8)).convert(mode)
    error = np.abs(pixels(saved(picture, form)).astype(int) - np.asarray(picture.convert("RGB"), dtype=int))
    assert error.max() <= (0 if form in ("PNG", "GIF") else 20) and error.mean() < 3


def test_transparency_is_shown_over_white() -> None:
    picture = Image.new("RGBA", (10, 10), (0, 0, 0, 0))
    picture.putpixel((3, 4), (255, 0, 0, 255))
    picture.putpixel((5, 5), (0, 0, 0, 128))
    shown = pixels(saved(picture))
    assert (shown[0, 0].tolist(), shown[4, 3].tolist(), shown[5, 5].tolist()) == ([255] * 3, [255, 0, 0], [127] * 3)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9, 50, 60, 70])
    assert pixels(saved(palette, transparency=1))[0, 0].tolist() == [255] * 3


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16)[None].repeat(8, 0)
    shown = pixels(saved(Image.fromarray(ramp)))
    assert shown[0, :, 0].tolist() == (ramp[0] >> 8).tolist()


def test_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        file = saved(frames[0], form, save_all=True, append_images=frames[1:])
        assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(file))))) == 3
        assert np.abs(pixels(file)[10, 10].astype(int) - [255, 0, 0]).max() < 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_exif_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = saved(image(30, 20), exif=exif)
    assert np.array_equal(pixels(file), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file)))))


@pytest.mark.filterwarnings("ignore")
def test_exif_that_is_none_is_ignored() -> None:
    file = saved(
        image(30, 20), "JPEG", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff" + b"\x01\x12\x00\x03\xff" * 3
    )
    assert pixels(file).shape == (20, 30, 3)


def test_low_detail_is_scaled_down() -> None:
    file = image_bytes(1000, 700, form="JPEG")
    assert pixels(file, "low").shape[:2] == (round(LOW_DETAIL * 0.7), LOW_DETAIL)
    assert pixels(file, "high").shape[:2] == pixels(file).shape[:2] == (700, 1000)
    assert np.array_equal(pixels(image_bytes(512, 300), "low"), pixels(image_bytes(512, 300)))


def test_refusals_name_the_image() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(MediaInput(b""), MAX_PIXELS)
    assert caught.value.param == "image"


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=200)
@given(
    form=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]),
    changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=12),
    length=st.integers(0, 4000),
)
def test_any_damage_is_a_refusal_or_an_image(form: str, changes: list[tuple[int, int]], length: int) -> None:
    file = bytearray(image_bytes(60, 40, form=form))
    for at, value in changes:
        file[at % len(file)] = value
    try:
        picture = decode(MediaInput(bytes(file[: len(file) - length // 40])), MAX_PIXELS)
    except InvalidRequest as error:
        assert "image" in str(error) and error.param == "image"
    else:
        assert picture.mode == "RGB" and picture.width * picture.height <= MAX_PIXELS
