"""Log-mel spectrograms of speech, as Whisper and models with its encoder take them.

They equal those of transformers' `WhisperFeatureExtractor` to the precision of float32. They need neither torch nor
transformers, because the API process computes them, too.
"""

from functools import cache

import msgspec
import numpy as np

SAMPLE_RATE = 16000
HOP = 160
"""Samples from one frame to the next: a frame is 10 ms."""
_WINDOW = 400
_RANGE = 8.0
"""Powers of ten below the loudest value at which silence begins."""
_AT_ONCE = 3000
"""Frames that are computed together."""


class Recording(msgspec.Struct, frozen=True):
    """The features of a whole file."""

    seconds: float
    frames: int
    """Frames that the recording has, without the silence that fills up its first window."""
    bins: int
    data: bytes
    """float32 [bins, frames], or more frames if silence fills it up."""

    def window(self, start: int, frames: int) -> bytes:
        """Return the features of a window, float32 [bins, frames]; zeros follow the last frame."""
        whole = np.frombuffer(self.data, np.float32).reshape(self.bins, -1)
        found = np.zeros((self.bins, frames), np.float32)
        part = whole[:, start : start + frames]
        found[:, : part.shape[1]] = part
        return found.tobytes()

    def silent(self, start: int, frames: int) -> bool:
        """Return whether a window has no sound at all: its features are one value, 80 dB below the loudest frame."""
        part = np.frombuffer(self.data, np.float32).reshape(self.bins, -1)[:, start : start + frames]
        return bool(part.min() == part.max())


def log_mel(samples: np.ndarray, bins: int) -> np.ndarray:
    """Return the features of mono samples at 16 kHz, float32 in [-1, 1]: float32 [bins, len(samples) // HOP].

    Values are relative to the loudest of all samples. There must be more than 200 samples; Whisper's encoder takes 30
    seconds, to which silence fills shorter speech.
    """
    count = len(samples) // HOP
    logs = np.empty((bins, count), np.float32)
    for start in range(0, count, _AT_ONCE):
        end = min(start + _AT_ONCE, count)
        logs[:, start:end] = log_mel_part(samples, bins, start, end)
    return normalized(logs)


def log_mel_part(samples: np.ndarray, bins: int, start: int, end: int) -> np.ndarray:
    """Return frames `start` to `end` before they are normalized: log10 of the power, float32 [bins, end - start].

    A frame is around its first sample; before the first and after the last the samples are mirrored.
    """
    half = _WINDOW // 2
    first, last = start * HOP - half, (end - 1) * HOP + half
    before, after = max(0, -first), max(0, last - len(samples))
    piece = samples[max(0, first) : last].astype(np.float32, copy=False)
    if before or after:
        piece = np.pad(piece, (before, after), mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(piece, _WINDOW)[::HOP]
    spectrum = np.fft.rfft(frames * _hann())
    power = spectrum.real**2 + spectrum.imag**2
    return np.log10(np.maximum(_filters(bins) @ power.T, 1e-10, dtype=np.float32))


def normalized(logs: np.ndarray, loudest: float | None = None) -> np.ndarray:
    """Return features of logarithms, relative to the `loudest` of the whole recording, else of these."""
    top = logs.max() if loudest is None else np.float32(loudest)
    features: np.ndarray = np.maximum(logs, top - np.float32(_RANGE))
    features += np.float32(4)  # in place: a recording of hours takes hundreds of megabytes
    features /= np.float32(4)
    return features


@cache
def _hann() -> np.ndarray:
    return np.hanning(_WINDOW + 1)[:-1].astype(np.float32)


@cache
def _filters(bins: int) -> np.ndarray:
    """Return triangular filters up to 8 kHz on Slaney's mel scale, each of the same area: float32 [bins, 201]."""
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _WINDOW // 2 + 1)
    edges = _hertz(np.linspace(0, _mel(SAMPLE_RATE / 2), bins + 2))
    widths = np.diff(edges)
    slopes = edges[:, None] - frequencies
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    filters: np.ndarray = (triangles * (2 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)
    return filters


_LINEAR = 200 / 3
"""Hertz of a mel up to 1 kHz; above, the scale is logarithmic."""
_BREAK = 1000 / _LINEAR
_STEP = np.log(6.4) / 27


def _mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < 1000 else _BREAK + float(np.log(hertz / 1000)) / _STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < _BREAK, mels * _LINEAR, 1000 * np.exp(_STEP * (mels - _BREAK)))
