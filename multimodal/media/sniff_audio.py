"""Finds the format, channels and length of audio files from their headers. Nothing is decoded, and declared types are
ignored.

The decoder counts whatever a header does not say, such as the length of an MP3 (`engine/kit/audio_file.py`).
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

from multimodal.errors import InvalidMedia, UnsupportedMedia

MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 4_000, 192_000
"""Samples per second."""
_MAX_CHUNKS = 256
_PAGE = 1 << 16
"""Maximum bytes of a page of an Ogg file, whose last page has its length."""
_OPUS_RATE = 48_000
_SUPPORTED = "WAV, FLAC, MP3, Ogg and Opus"


class _Sound(NamedTuple):
    channels: int = 1
    rate: int = 16_000
    seconds: float = 0.0
    """0 if the header does not say."""


def check_audio(data: bytes, max_seconds: float) -> None:
    """Raise UnsupportedMedia for a file of another format, InvalidMedia for one that its header shows to be broken, too
    long, or of channels and rates that are not supported."""
    reader = next((reader for magic, reader in _READERS.items() if data.startswith(magic)), None)
    if reader is None or (reader is _wav and data[8:12] != b"WAVE") or (reader is _mp3 and not _is_mp3(data)):
        raise UnsupportedMedia(f"Unsupported audio format. Supported formats are {_SUPPORTED}.")
    try:
        sound = reader(data)
    except (ValueError, IndexError, struct.error) as error:
        raise InvalidMedia("A recording's header is broken.") from error
    if not 1 <= sound.channels <= MAX_CHANNELS:
        raise InvalidMedia(f"A recording has {sound.channels} channels; 1 to {MAX_CHANNELS} are taken.")
    if not MIN_RATE <= sound.rate <= MAX_RATE:
        raise InvalidMedia(f"A recording has {sound.rate} samples a second; {MIN_RATE} to {MAX_RATE} are taken.")
    if sound.seconds > max_seconds:
        raise InvalidMedia(f"A recording takes {sound.seconds:.0f} seconds; the most is {max_seconds:g}.")


def _wav(data: bytes) -> _Sound:
    """The chunk `fmt `, then the chunk `data`; a size beyond the file's end means all of the file."""
    at, sound, bytes_a_second = 12, _Sound(), 0
    for _ in range(_MAX_CHUNKS):
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind == b"fmt ":
            channels, rate, bytes_a_second = struct.unpack_from("<2xHII", data, at + 8)
            sound = _Sound(channels, rate)
        if kind == b"data":
            if not bytes_a_second:
                raise ValueError
            return sound._replace(seconds=min(size, len(data) - at - 8) / bytes_a_second)
        at += 8 + size + size % 2
    raise ValueError


def _flac(data: bytes) -> _Sound:
    """STREAMINFO: 20 bits of rate, 3 of channels, 5 of depth and 36 of samples, 0 for unknown."""
    (facts,) = struct.unpack_from(">Q", data, 18)
    rate = facts >> 44
    return _Sound((facts >> 41 & 7) + 1, rate, (facts & (1 << 36) - 1) / max(1, rate))


def _ogg(data: bytes) -> _Sound:
    """The first packet has channels and rate, the last page the number of the last sample."""
    at = 27 + data[26]
    if data.startswith(b"OpusHead", at):
        channels, rate = data[at + 9], _OPUS_RATE
    elif data.startswith(b"\x01vorbis", at):
        channels, rate = struct.unpack_from("<BI", data, at + 11)
    elif data.startswith(b"\x7fFLAC", at):
        return _flac(data[at + 9 :])
    else:
        raise ValueError
    last = data.rfind(b"OggS", -_PAGE)
    (samples,) = struct.unpack_from("<q", data, last + 6)
    return _Sound(channels, rate, max(0, samples) / max(1, rate))


def _mp3(_: bytes) -> _Sound:
    """Return a sound without facts: only all frames together have the length."""
    return _Sound()


def _is_mp3(data: bytes) -> bool:
    """Return whether a file begins with ID3, or with the header of a frame of layer III."""
    return data.startswith(b"ID3") or (len(data) > 3 and data[1] & 0xE6 == 0xE2 and data[2] & 0xF0 != 0xF0)


_READERS: dict[bytes, Callable[[bytes], _Sound]] = {
    b"RIFF": _wav,
    b"fLaC": _flac,
    b"OggS": _ogg,
    b"ID3": _mp3,
    b"\xff": _mp3,
}
