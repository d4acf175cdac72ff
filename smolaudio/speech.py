"""Recordings of synthetic speech: espeak-ng speaks, then loudness, band, silence and noise are varied.

espeak-ng is a library under the GPL, from the PyPI package `espeakng-loader`; only training and evaluation use it.
"""

import ctypes
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np

RATE = 16_000
SECONDS = 7
"""Longest recording. Nothing that is said takes longer."""
ACCENTS = ("en-us", "en", "en-gb-scotland", "en-029", "en-us-nyc", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-gb-x-gbclan")
VARIANTS = (
    *("m1", "m2", "m3", "m4", "m5", "m7", "m8", "f1", "f2", "f3", "f5", "Alex", "Alicia", "Andrea", "Andy", "Denis"),
    *("Diogo", "Gene", "Hugo", "Jacky", "Marco", "Mario", "Michael", "Mike", "Reed", "adam", "anika", "antonio"),
    *("aunty", "belinda", "benjamin", "boris", "caleb", "david", "ed", "edward", "grandma", "grandpa", "ian", "linda"),
    *("marcelo", "max", "miguel", "norbert", "pablo", "paul", "pedro", "quincy", "rob", "robert", "sandro", "steph"),
    *("travis", "victor", "zac"),
)
HELD_OUT_VARIANTS = ("m6", "f4", "Annie", "Lee", "john", "shelby")
SPEEDS = (*range(110, 150), *range(165, 205))
"""Words a minute."""
HELD_OUT_SPEEDS = tuple(range(150, 165))
_SPEED, _PITCH, _SPREAD = 1, 3, 4  # espeak_PARAMETER
_SYNCHRONOUS, _UTF8 = 2, 1
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Voice(NamedTuple):
    """A voice of espeak-ng."""

    name: str
    speed: int
    pitch: int
    spread: int
    """Variation of the pitch."""


def make_voice(rng: Random, *, held_out: bool = False) -> Voice:
    """Return a voice. Held-out ones differ in kind and in speed from all that training hears."""
    variant = rng.choice(HELD_OUT_VARIANTS if held_out else VARIANTS)
    speed = rng.choice(HELD_OUT_SPEEDS if held_out else SPEEDS)
    return Voice(f"{rng.choice(ACCENTS)}+{variant}", speed, rng.randint(30, 70), rng.randint(30, 70))


@cache
def _espeak() -> tuple[ctypes.CDLL, int, list[np.ndarray], object]:
    """Return the library, its samples a second, the pieces that it speaks, and what it calls, which must live on."""
    import espeakng_loader  # noqa: PLC0415 - the rest does without

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0)
    if rate <= 0:
        raise RuntimeError("espeak-ng does not start")
    pieces: list[np.ndarray] = []

    @_Callback
    def spoken(samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: int) -> int:
        if samples and count:
            pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    library.espeak_SetSynthCallback(spoken)
    return library, rate, pieces, spoken


def speak(text: str, voice: Voice) -> np.ndarray:
    """Return speech as float32 samples at RATE, at most 1 in size."""
    library, rate, pieces, _ = _espeak()
    pieces.clear()
    if library.espeak_SetVoiceByName(voice.name.encode()):
        raise ValueError(f"espeak-ng has no voice {voice.name}")
    for parameter, value in ((_SPEED, voice.speed), (_PITCH, voice.pitch), (_SPREAD, voice.spread)):
        library.espeak_SetParameter(parameter, value, 0)
    encoded = text.encode() + b"\0"
    library.espeak_Synth(encoded, len(encoded), 0, 1, 0, _UTF8, None, None)
    samples = np.concatenate(pieces).astype(np.float32)
    return _resampled(samples, rate) / max(1.0, float(np.abs(samples).max()))


def record(text: str, voice: Voice, rng: Random) -> np.ndarray:
    """Return a recording as int16 samples at RATE: `text`, or nothing if it is empty, in silence or noise."""
    before, after = (int(rng.uniform(0.05, 0.5) * RATE) for _ in range(2))
    speech = speak(text, voice) if text else np.zeros(int(rng.uniform(0.3, 2) * RATE), np.float32)
    sound = np.zeros(before + len(speech) + after, np.float32)
    sound[before : before + len(speech)] = speech
    if rng.random() < 0.2:
        sound = _muffled(sound, rng.uniform(3200, 7000))
    level = float(np.sqrt(np.mean(speech**2))) if text else 0.1
    if rng.random() < 0.6:
        decibels = rng.uniform(8, 35)
        sound = sound + level * 10 ** (-decibels / 20) * _noise(len(sound), rng)
    loudness = 10 ** (rng.uniform(-22, -1) / 20) / max(1e-3, float(np.abs(sound).max()))
    return np.clip(sound * loudness * 32767, -32768, 32767).astype(np.int16)[: SECONDS * RATE]


def _resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Return samples at RATE instead of `rate`, by cutting off the spectrum."""
    step = rate // np.gcd(rate, RATE)
    padded = np.pad(samples, (0, -len(samples) % step))
    count = len(padded) // step * (RATE * step // rate)
    spectrum = np.fft.rfft(padded)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(padded))).astype(np.float32)


def _muffled(samples: np.ndarray, hertz: float) -> np.ndarray:
    spectrum = np.fft.rfft(samples)
    spectrum[int(hertz / RATE * len(samples)) :] = 0
    return np.fft.irfft(spectrum, len(samples)).astype(np.float32)


def _noise(count: int, rng: Random) -> np.ndarray:
    """Return white, pink or brown noise of mean square 1."""
    values = np.random.default_rng(rng.getrandbits(32)).standard_normal(count).astype(np.float32)
    spectrum = np.fft.rfft(values)
    spectrum[1:] /= np.arange(1, len(spectrum)) ** rng.choice((0, 0.5, 1))
    shaped = np.fft.irfft(spectrum, count).astype(np.float32)
    return shaped / max(1e-9, float(np.sqrt(np.mean(shaped**2))))
