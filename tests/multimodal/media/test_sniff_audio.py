import io
import struct

import numpy as np
import pytest
import soundfile

from multimodal.errors import InvalidMedia, UnsupportedMedia
from multimodal.media.sniff_audio import check_audio


def file(kind: str, seconds: float = 3, rate: int = 16_000, channels: int = 1, subtype: str | None = None) -> bytes:
    written = io.BytesIO()
    soundfile.write(written, np.zeros((int(seconds * rate), channels)), rate, format=kind, subtype=subtype)
    return written.getvalue()


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", "PCM_16"), ("WAV", "ULAW"), ("WAVEX", "FLOAT"), ("FLAC", None), ("OGG", "VORBIS"),
                          ("OGG", "OPUS")]
)  # fmt: skip
def test_the_length_is_read_from_the_header(kind: str, subtype: str | None) -> None:
    data = file(kind, subtype=subtype)
    check_audio(data, 3.1)
    with pytest.raises(InvalidMedia, match="takes 3 seconds"):
        check_audio(data, 2.9)


def test_an_mp3_is_known_by_its_frames_and_its_tags() -> None:
    frames = file("MP3")
    check_audio(frames, 60)
    check_audio(b"ID3\x04\0\0\0\0\0\0" + frames, 60)


def test_a_wav_that_was_streamed_is_as_long_as_its_file() -> None:
    data = bytearray(file("WAV"))
    data[40:44] = struct.pack("<I", 0xFFFFFFFF)
    check_audio(bytes(data), 3.1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Unsupported audio format"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "Unsupported audio format"),
        (b"\xff\xd8\xff\xe0", "Unsupported audio format"),
        (b"\x89PNG\r\n\x1a\n", "Unsupported audio format"),
        (b"RIFF\0\0\0\0WAVEdata\4\0\0\0\0\0\0\0", "header is broken"),
        (b"OggS" + bytes(40), "header is broken"),
        (b"fLaC", "header is broken"),
        (file("WAV", 0.01, channels=9), "9 channels"),
        (file("WAV", 0.1, rate=1000), "1000 samples a second"),
    ],
)
def test_invalid_headers_are_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises((UnsupportedMedia, InvalidMedia), match=message):
        check_audio(data, 60)


def test_damaged_headers_raise_nothing_else() -> None:
    rng = np.random.default_rng(0)
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        whole = np.frombuffer(file(kind, 0.1), np.uint8)
        for length in (12, 30, 60, len(whole)):
            for _ in range(30):
                damaged = whole[:length].copy()
                damaged[rng.integers(min(length, 60), size=4)] = rng.integers(256, size=4)
                try:
                    check_audio(damaged.tobytes(), 1)
                except (UnsupportedMedia, InvalidMedia):
                    continue
