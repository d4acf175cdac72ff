import io
from contextlib import suppress

import numpy as np
import pytest
import soundfile

from engine.errors import InvalidRequest
from engine.kit.audio_file import RATE, claimed_seconds, decode_audio


def file(samples: np.ndarray, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format=kind, subtype=subtype)
    return written.getvalue()


def tone(seconds: float, rate: int, channels: int = 1, hertz: float = 440) -> np.ndarray:
    wave = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    return np.stack([wave] * channels, axis=1)


@pytest.mark.parametrize(
    ("kind", "subtype", "rate"),
    [
        ("WAV", "PCM_16", RATE),
        ("WAV", "FLOAT", 44_100),
        ("FLAC", "PCM_24", 44_100),
        ("OGG", "VORBIS", 22_050),
        ("OGG", "OPUS", 48_000),
        ("MP3", "MPEG_LAYER_III", 44_100),
    ],
)
def test_every_format_is_resampled_and_mixed(kind: str, subtype: str, rate: int) -> None:
    data = file(tone(1, rate, channels=2), rate, kind, subtype)
    assert claimed_seconds(data) == pytest.approx(1, abs=0.1)
    samples = decode_audio(data, 2)
    assert samples.dtype == np.float32
    assert abs(len(samples) - RATE) < RATE / 10, "a codec may pad"
    spectrum = np.abs(np.fft.rfft(samples[2000:14000]))
    assert abs(spectrum.argmax() * RATE / 12000 - 440) < 2
    assert samples.max() == pytest.approx(0.5, abs=0.1)


def test_values_beyond_full_scale_are_cut_off() -> None:
    assert np.abs(decode_audio(file(8 * tone(0.1, RATE), RATE, subtype="FLOAT"), 1)).max() == 1


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3", "OGG"])
def test_a_bomb_is_refused(kind: str) -> None:
    bomb = file(np.zeros(8_000 * 30, np.int16), 8_000, kind)
    with pytest.raises(InvalidRequest, match="longer than 29 seconds"):
        decode_audio(bomb, 29)


def test_a_flac_that_hides_its_length_is_refused_while_it_is_decoded() -> None:
    flac = bytearray(file(np.zeros(8_000 * 30, np.int16), 8_000, "FLAC"))
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)  # number of samples, 0 for unknown
    with pytest.raises(InvalidRequest, match="longer than 29 seconds"):
        decode_audio(bytes(flac), 29)


def test_decoding_ends_once_nobody_waits() -> None:
    looks = iter([True, False])
    with pytest.raises(InvalidRequest, match="nobody waits"):
        decode_audio(file(np.zeros(1 << 18, np.int16), RATE), 60, lambda: next(looks))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"OggS" + bytes(100), "cannot be read"),
        (file(tone(0.1, 8_000), 8_000, "AIFF"), "cannot be read"),
        (file(tone(0.1, 1_000), 1_000), "1000 samples a second"),
        (file(tone(0.1, 8_000, channels=9), 8_000), "9 channels"),
        (file(np.full(100, np.nan), 8_000, subtype="FLOAT"), "not finite"),
        (file(np.resize([3e38, -3e38], 44_100), 44_100, subtype="FLOAT"), "not finite"),
        (file(np.zeros(0), 8_000), "no samples"),
        (file(tone(1, 8_000), 8_000, "FLAC")[:3000], "damaged or incomplete"),
    ],
)
def test_invalid_files_are_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode_audio(data, 60)


def test_damaged_files_raise_nothing_else() -> None:
    rng = np.random.default_rng(0)
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        whole = np.frombuffer(file(tone(0.2, 16_000), 16_000, kind), np.uint8)
        for _ in range(20):
            damaged = whole.copy()
            damaged[rng.integers(len(whole), size=8)] = rng.integers(256, size=8)
            with suppress(InvalidRequest):
                assert np.isfinite(decode_audio(damaged.tobytes(), 10)).all()
