"""Finds the format of media files and the size of images from their bytes. Nothing is decoded, and declared types are
ignored.

A decoder trusts the header too, so its allocations are known, and limited, here. Headers that give the size twice, or
hide a larger image, are read as far as a decoder reads before its first pixel; anything unusual is rejected.
"""

import struct
from collections.abc import Callable

from multimodal.errors import InvalidMedia, UnsupportedMedia

MIN_SIDE = 4
"""Pixels per side. Code that guesses the order of an array's axes would take a smaller side for colour channels."""
MAX_SIDE = 65_535
"""The limit of JPEG."""
_ORIENTATION = 0x0112
"""The EXIF tag for the orientation of a photo."""
_MAX_STEPS = 4096
"""Maximum number of chunks, segments or blocks before the first pixel."""
_MAX_SCANS = 100
"""Maximum scans of a progressive JPEG. Each costs a pass over all pixels; encoders make about ten."""
_SUPPORTED = "PNG, JPEG, WEBP and GIF"


class _Broken(Exception):
    """The header is malformed."""


def check_image(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return width and height of an image file: of a photo turned upright, of the first frame of an animation. Raises
    UnsupportedMedia and InvalidMedia.
    """
    reader = next((reader for magic, reader in _READERS.items() if data.startswith(magic)), None)
    if reader is None or (reader is _webp and data[8:12] != b"WEBP"):
        raise UnsupportedMedia(f"Unsupported image format. Supported formats are {_SUPPORTED}.")
    try:
        width, height = reader(data)
    except (_Broken, IndexError, struct.error) as error:
        raise InvalidMedia("An image's header is broken.") from error
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_SIDE:
        raise InvalidMedia(f"An image is {width} x {height} pixels; a side may have {MIN_SIDE} to {MAX_SIDE}.")
    if width * height > max_pixels:
        raise InvalidMedia(f"An image is {width} x {height} pixels; it may have {max_pixels} in all.")
    return width, height


def check_video(data: bytes) -> None:
    """Check that a file is an MP4 (or QuickTime), WebM, Matroska or AVI file. Raises UnsupportedMedia.

    No playlist begins like these formats, so FFmpeg, which reads them, opens no other files. The rest of the headers is
    read by the decoder, in a process that may be killed.
    """
    if not (
        data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide")
        or data.startswith(b"\x1a\x45\xdf\xa3")
        or (data.startswith(b"RIFF") and data[8:12] == b"AVI ")
    ):
        raise UnsupportedMedia("Unsupported video format. Supported formats are MP4, WebM, Matroska and AVI.")


def _png(data: bytes) -> tuple[int, int]:
    """IHDR comes first, once, and IDAT after it."""
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if (length, kind) != (13, b"IHDR"):
        raise _Broken
    at = 33
    for _ in range(_MAX_STEPS):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            return width, height
        if kind in (b"IHDR", b"IEND"):
            raise _Broken
        at += 12 + length
    raise _Broken


def _jpeg(data: bytes) -> tuple[int, int]:
    """The one frame header before the first scan: baseline, extended or progressive."""
    at, size = 2, None
    turned: bool | None = None
    for _ in range(_MAX_STEPS):
        if data[at] != 0xFF:
            raise _Broken
        marker = data[at + 1]
        if marker == 0xFF:  # fills
            at += 1
            continue
        if marker == 0xDA:
            if size is None or data.count(b"\xff\xda", at) > _MAX_SCANS:
                raise _Broken
            return size[::-1] if turned else size
        length, _, height, width = struct.unpack_from(">HBHH", data, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if marker > 0xC2 or size is not None:
                raise _Broken
            size = width, height
        if marker == 0xE1 and turned is None and data.startswith(b"Exif\0\0", at + 4):
            turned = _turns_sides(data[at + 10 : at + 2 + length])
        if length < 2 or marker < 0xC0 or 0xD0 <= marker <= 0xD9:  # no segment belongs here
            raise _Broken
        at += 2 + length
    raise _Broken


def _turns_sides(exif: bytes) -> bool:
    """Return whether EXIF turns a photo by 90 degrees; unreadable EXIF does not."""
    order = {b"II*": "<", b"MM\0": ">"}.get(exif[:3])
    if order is None:
        return False
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, start)
        for place in range(start + 2, start + 2 + 12 * entries, 12):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, place)
            if tag == _ORIENTATION:
                return value in range(5, 9)
    except struct.error:
        pass
    return False


def _gif(data: bytes) -> tuple[int, int]:
    """The screen, or the first frame where that reaches beyond it: decoders enlarge the screen then."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (2 << (flags & 7)) * 3 * (flags >> 7)
    for _ in range(_MAX_STEPS // 64):
        if data[at] == 0x2C:
            left, top, wide, high = struct.unpack_from("<HHHH", data, at + 1)
            return max(width, left + wide), max(height, top + high)
        if data[at] != 0x21:
            raise _Broken
        at = _after_blocks(data, at + 2)
    raise _Broken


def _after_blocks(data: bytes, at: int) -> int:
    """Return the offset after a GIF's chain of blocks, each of which begins with its length."""
    for _ in range(_MAX_STEPS):
        if not data[at]:
            return at + 1
        at += 1 + data[at]
    raise _Broken


def _webp(data: bytes) -> tuple[int, int]:
    """The canvas, which the frames of a valid file fill or keep within."""
    if len(data) < 30:
        raise _Broken
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise _Broken


_READERS: dict[bytes, Callable[[bytes], tuple[int, int]]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8\xff": _jpeg,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
    b"RIFF": _webp,
}
