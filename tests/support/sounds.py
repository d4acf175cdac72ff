"""Recordings for tests."""

import io
import wave

import numpy as np


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Return int16 samples at 16 kHz: tones that differ by seed, in noise."""
    noise = np.random.default_rng(seed)
    time = np.arange(int(seconds * 16_000)) / 16_000
    wave = 0.4 * np.sin(2 * np.pi * np.cumsum(300 + 200 * np.sin(5 * time + seed)) / 16_000)
    return ((wave + 0.02 * noise.normal(size=time.size)) * 32_000).astype(np.int16)


def sound_bytes(seconds: float, seed: int = 0) -> bytes:
    """The same as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 16_000, 0, "NONE", ""))
        written.writeframes(sound(seconds, seed).tobytes())
    return file.getvalue()
