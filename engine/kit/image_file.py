"""Decode an image file to upright RGB pixels. An image that cannot be decoded raises InvalidRequest."""

import io

import numpy as np
from PIL import Image

from engine.errors import InvalidRequest
from engine.media import MediaInput

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
LOW_DETAIL = 512
"""Maximum side, in pixels, of an image of low detail."""
MAX_RATIO = 200
"""Maximum ratio of the sides: scaled until its shorter side fits a model, a longer image would be huge."""
_ORIENTATION = 0x0112  # of EXIF
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# With blocks this large the C library returns an image's memory when it is freed; with Pillow's default of 16 MiB each
# thread would keep a gigabyte.
Image.core.set_block_size(64 << 20)  # type: ignore[attr-defined]


def limit_pixels(most: int) -> None:
    """Make Pillow refuse larger images, too, anywhere in a file. Applies to the whole process."""
    Image.MAX_IMAGE_PIXELS = most


def pixels(image: MediaInput) -> int:
    """Return the number of pixels by the file's header; 0 if it cannot be read, which `decode` refuses."""
    try:
        with Image.open(io.BytesIO(image.data), formats=FORMATS) as opened:
            return opened.width * opened.height
    except Exception:  # whatever Pillow's parsers raise
        return 0


def decode(image: MediaInput, max_pixels: int) -> Image.Image:
    """Return the first frame, turned as its EXIF says, transparency over white. Raises InvalidRequest."""
    try:
        opened = Image.open(io.BytesIO(image.data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(max_pixels) from error
    except Exception as error:  # whatever its parsers raise on bytes that are no image
        raise InvalidRequest(
            "the image cannot be read: it must be a whole PNG, JPEG, WEBP or GIF file", "image"
        ) from error
    with opened:
        width, height = opened.size
        if width * height > max_pixels:
            raise _too_large(max_pixels, width, height)
        if max(width, height) > MAX_RATIO * min(width, height):
            raise InvalidRequest(
                f"the image, {width} x {height} pixels, is more than {MAX_RATIO} times as long as it is wide", "image"
            )
        try:
            if image.detail == "low":
                opened.thumbnail((LOW_DETAIL, LOW_DETAIL))
            return _upright(_rgb(opened), _orientation(opened))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise _too_large(max_pixels) from error
        except MemoryError:
            raise
        except Exception as error:  # likewise
            raise InvalidRequest("the image is damaged or incomplete", "image") from error


def _too_large(max_pixels: int, width: int = 0, height: int = 0) -> InvalidRequest:
    size = f", {width} x {height}," if width else ""
    return InvalidRequest(f"the image{size} has more than {max_pixels} pixels", "image")


def _rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to 8
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGB", layer.size, "white")
    white.paste(layer, mask=layer.getchannel("A"))
    return white


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF that cannot be read says nothing about the image, which can
        return 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image
