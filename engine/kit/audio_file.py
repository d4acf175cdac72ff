"""Decode an audio file to mono samples at 16 kHz, piece by piece, so that a file that decodes to hours takes no memory.

A file that cannot be decoded, or is longer than it may be, raises InvalidRequest. The formats are those of
`multimodal/media/sniff_audio.py`; libsndfile's many others are never tried.
"""

import io
from collections.abc import Callable

import numpy as np
import soundfile
import soxr

from engine.errors import InvalidRequest

RATE = 16_000
"""Samples per second of the result of `decode_audio`."""
MIN_RATE, MAX_RATE = 4_000, 192_000
"""Samples per second that a file may have."""
MAX_CHANNELS = 8
_FORMATS = {"WAV", "WAVEX", "FLAC", "OGG", "MP3"}
_MAGIC = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff")
_PIECE = 1 << 16
"""Values decoded at a time."""


def decode_audio(data: bytes, max_seconds: float, going_on: Callable[[], bool] = lambda: True) -> np.ndarray:
    """Return a WAV, FLAC, MP3, Ogg Vorbis or Opus file as float32 [samples] in -1 to 1, the mean of its channels.

    Call it in a process that may be killed, because it parses untrusted bytes. Ends early once `going_on` returns
    False. Raises InvalidRequest.
    """
    with _opened(data) as file:
        try:
            return _samples(file, max_seconds, going_on)
        except (soundfile.SoundFileError, RuntimeError) as error:
            raise InvalidRequest("the audio is damaged or incomplete", "audio") from error


def claimed_seconds(data: bytes) -> float:
    """Return how long a file is as its headers say, which may be wrong. Raises InvalidRequest."""
    with _opened(data) as file:
        return float(file.frames / file.samplerate)


def _opened(data: bytes) -> soundfile.SoundFile:
    if not data.startswith(_MAGIC):
        raise _unreadable()
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise _unreadable() from error
    if file.format not in _FORMATS:
        raise _unreadable()
    if not MIN_RATE <= file.samplerate <= MAX_RATE or file.channels > MAX_CHANNELS:
        raise InvalidRequest(
            f"the audio has {file.channels} channels of {file.samplerate} samples a second; it may have up to "
            f"{MAX_CHANNELS} of {MIN_RATE} to {MAX_RATE}",
            "audio",
        )
    return file


def _samples(file: soundfile.SoundFile, max_seconds: float, going_on: Callable[[], bool]) -> np.ndarray:
    most = int(max_seconds * file.samplerate)
    if file.frames > most:
        raise _too_long(max_seconds)
    resampler = soxr.ResampleStream(file.samplerate, RATE, 1, "float32") if file.samplerate != RATE else None
    pieces = []
    count = 0
    while len(piece := file.read(_PIECE // file.channels, dtype="float32", always_2d=True)):
        count += len(piece)
        if count > most:  # the header lied, or did not say
            raise _too_long(max_seconds)
        if not going_on():
            raise InvalidRequest("nobody waits for the audio any more", "audio")
        mono = piece.mean(axis=1)
        pieces.append(resampler.resample_chunk(mono) if resampler else mono)
    if resampler:
        pieces.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    if not count:
        raise InvalidRequest("the audio has no samples", "audio")
    samples = np.concatenate(pieces)
    if not np.isfinite(samples).all():  # as they are in the file, or because they are too large to be resampled
        raise InvalidRequest("the audio has samples that are not finite", "audio")
    return samples.clip(-1, 1, out=samples)


def _unreadable() -> InvalidRequest:
    return InvalidRequest("the audio cannot be read: it must be a whole WAV, FLAC, MP3, Ogg or Opus file", "audio")


def _too_long(max_seconds: float) -> InvalidRequest:
    return InvalidRequest(f"the audio is longer than {max_seconds:g} seconds", "audio")
