"""Features of speech are those of transformers."""

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from engine.kit.log_mel import SAMPLE_RATE, Recording, log_mel
from tests.support.whisper_models import speech


@pytest.mark.parametrize(("bins", "seconds"), [(80, 31.7), (128, 0.5)])
def test_features_are_those_of_transformers(bins: int, seconds: float) -> None:
    samples = speech(seconds)
    extract = WhisperFeatureExtractor(feature_size=bins)
    wanted = extract(samples, sampling_rate=SAMPLE_RATE, return_tensors="np", truncation=False, padding="longest")
    found = log_mel(samples, bins)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted.input_features[0], atol=2e-4)


def test_silence_and_speech_that_is_filled_up() -> None:
    extract = WhisperFeatureExtractor(chunk_length=5)
    for samples in (np.zeros(16000, np.float32), speech(3.25)):
        filled = np.zeros(5 * SAMPLE_RATE, np.float32)
        filled[: len(samples)] = samples
        wanted = extract(samples, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features[0]
        np.testing.assert_allclose(log_mel(filled, 80), wanted, atol=2e-4)


def test_windows_without_any_sound_are_found_before_and_between_speech() -> None:
    nothing = np.zeros(3 * SAMPLE_RATE, np.float32)
    for samples, silent in (
        (np.concatenate([nothing, speech(3.0), nothing]), [True, False, True]),
        (np.tile(nothing, 3), [True, True, True]),
        (1e-4 * np.random.default_rng(0).standard_normal(9 * SAMPLE_RATE).astype(np.float32), [False, False, False]),
    ):
        recording = Recording(9.0, 900, 80, log_mel(samples, 80).tobytes())
        assert [recording.silent(start, 290) for start in (0, 305, 610)] == silent
