"""Files that need no network: those in a data URL, and those in the server's media folder."""

import binascii
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from engine.media import MediaKind
from multimodal.errors import InvalidMedia, MediaError, UnsupportedMedia

_DATA = re.compile(r"data:(?P<type>[a-z0-9.+-]{1,64}/[a-z0-9.+-]{1,64});base64,", re.IGNORECASE | re.ASCII)
_TYPES: dict[MediaKind, tuple[str, ...]] = {
    "image": ("image/png", "image/jpeg", "image/webp", "image/gif", "image/jpg"),
    "video": (
        *("video/mp4", "video/webm", "video/matroska", "video/x-matroska", "video/avi", "video/x-msvideo"),
        *("video/vnd.avi", "video/quicktime"),
    ),
    "audio": (
        *("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "audio/flac", "audio/x-flac", "audio/mpeg"),
        *("audio/mp3", "audio/ogg", "audio/opus"),
    ),
}
_LETTERS = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_NO_BASE64 = "A data URL's data is not base64."
_CHUNK = 1 << 18
"""Characters decoded at a time, a multiple of four. Decoding holds the GIL, for which the event loop waits."""
_FILE = re.compile(r"file://(?:localhost)?(?P<path>/[^?#]*)(?:[?#].*)?", re.IGNORECASE | re.ASCII)
_NO_FILE = "The server's folder of media has no such file."
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def decode_data_url(url: str, max_bytes: int, kind: MediaKind = "image") -> bytes:
    """Decode the file in a data URL. Takes a millisecond per MiB: call it in a thread. Raises MediaError."""
    match = _DATA.match(url)
    if match is None:
        raise MediaError(f"A data URL must read data:{kind}/…;base64,… without parameters.")
    if match["type"].lower() not in _TYPES[kind]:
        raise UnsupportedMedia(f"Unsupported type of a data URL. Supported types are {', '.join(_TYPES[kind])}.")
    length = len(url) - match.end()
    if not length:
        raise InvalidMedia("A data URL is empty: nothing follows its comma.")
    if length // 4 * 3 - url.count("=", -2) > max_bytes:
        raise InvalidMedia(f"A file has more than {max_bytes} bytes.")
    if length % 4:
        broken = not _LETTERS.fullmatch(url, match.end())
        raise InvalidMedia(_NO_BASE64 if broken else "A data URL's base64 is cut off.")
    chunks: list[bytes] = []
    for start in range(match.end(), len(url), _CHUNK):
        try:
            chunks.append(binascii.a2b_base64(url[start : start + _CHUNK], strict_mode=True))
        except ValueError as error:  # binascii.Error is one, and so is a letter beyond ASCII
            raise InvalidMedia(_NO_BASE64) from error
        if len(chunks[-1]) * 4 != _CHUNK * 3 and start + _CHUNK < len(url):
            raise InvalidMedia("A data URL's base64 ends before its end.")
        time.sleep(0)  # release the GIL
    return b"".join(chunks)


def local_path(url: str) -> str:
    """Return the path of a file URL, with its escapes decoded once, or a plain path as it is. Raises MediaError."""
    if not url.lower().startswith("file:"):
        path = url
    elif match := _FILE.fullmatch(url):
        path = unquote(match["path"], errors="surrogateescape")
    else:
        raise MediaError("A file's URL is not a plain file URL.")
    if not path or "\0" in path:
        raise MediaError(_NO_FILE)
    return path


def read_file(path: str, folder: Path, max_bytes: int) -> bytes:
    """Read a regular file in `folder` or below it; call it in a thread.

    Raises MediaError, with the same message for a file outside the folder and for one that does not exist. Symbolic
    links are resolved first, and must stay within the folder. The path below the folder is then opened step by step
    without following links, so that a concurrent change of a link cannot lead outside the folder.
    """
    try:
        root = Path(os.path.realpath(folder, strict=True))
        real = Path(os.path.realpath(root / path, strict=True))
        data = _read(_opened(root, real.relative_to(root).parts), max_bytes + 1)
    except (OSError, ValueError) as error:
        raise MediaError(_NO_FILE) from error
    if len(data) > max_bytes:
        raise InvalidMedia(f"A file has more than {max_bytes} bytes.")
    return data


def _opened(root: Path, parts: Sequence[str]) -> int:
    """Open the path `parts` below `root` and return its descriptor. Raises OSError."""
    descriptor = os.open(root, _OPEN)
    for part in parts:
        above = descriptor
        try:
            descriptor = os.open(part, _OPEN, dir_fd=above)
        finally:
            os.close(above)
    return descriptor


def _read(descriptor: int, size: int) -> bytes:
    """Read at most `size` bytes of a regular file and close it. Raises OSError, and MediaError for other kinds."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MediaError(_NO_FILE)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(size)
    finally:
        os.close(descriptor)
