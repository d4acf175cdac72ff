"""The audio tower computes transformers' embeddings, and damaged models and files are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AudioFlamingo3ForConditionalGeneration, WhisperFeatureExtractor

from engine.config import EncoderConfig
from engine.embedded.vision.batches import BatchEncoder
from engine.errors import EngineFailure, InvalidRequest
from engine.media import EncodedMedia, MediaInput
from engine.transfer.shared_bytes import readable
from tests.support.audio_models import HIDDEN, WINDOW_SECONDS, build_audio_flamingo
from tests.support.sounds import sound, sound_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_audio_flamingo(tmp_path_factory.mktemp("flamingo"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> BatchEncoder:
    return BatchEncoder(config(folder))


def config(folder: Path) -> EncoderConfig:
    return EncoderConfig(model=str(folder), dtype="float32", threads=1, max_audio_seconds=6)


def encoded(encoder: BatchEncoder, *files: bytes) -> list[object]:
    found = {}
    for some in encoder.encode([MediaInput(file, kind="audio") for file in files]):
        found |= dict(some)
    return [found[place] for place in range(len(files))]


def test_embeddings_equal_those_of_transformers(folder: Path, encoder: BatchEncoder) -> None:
    model = AudioFlamingo3ForConditionalGeneration.from_pretrained(folder).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    lengths = (0.031, 0.5, WINDOW_SECONDS - 0.02, WINDOW_SECONDS, 5.3)
    outcomes = encoded(encoder, *(sound_bytes(seconds, seed=3) for seconds in lengths))
    for seconds, ours in zip(lengths, outcomes, strict=True):
        samples = sound(seconds, seed=3).astype(np.float32) / 32768
        windows = [samples[at : at + extractor.n_samples] for at in range(0, len(samples), extractor.n_samples)]
        inputs = extractor(windows, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
        with torch.inference_mode():
            theirs = model.get_audio_features(
                inputs["input_features"], inputs["attention_mask"], return_dict=True
            ).pooler_output
        assert isinstance(ours, EncodedMedia), ours
        assert (ours.rows, ours.text) == (len(theirs), "<sound>" * len(theirs))
        rows = torch.frombuffer(bytearray(readable(ours.data)), dtype=torch.float32).view(-1, HIDDEN)
        torch.testing.assert_close(rows, theirs, atol=2e-4, rtol=2e-4)


def test_only_invalid_recordings_of_a_batch_are_refused(encoder: BatchEncoder) -> None:
    assert encoder.info.audio and encoder.info.placeholder == "<sound>"
    outcomes = encoded(encoder, b"nothing", sound_bytes(0.02), sound_bytes(7), sound_bytes(1))
    assert [type(outcome) for outcome in outcomes] == [InvalidRequest] * 3 + [EncodedMedia]
    said = [str(outcome) for outcome in outcomes[:3]]
    for part, text in zip(("cannot be read", "too short", "longer than 6 seconds"), said, strict=True):
        assert part in text


def test_another_window_than_the_encoders_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    features = tmp_path / "preprocessor_config.json"
    features.unlink()
    WhisperFeatureExtractor(chunk_length=30).save_pretrained(tmp_path)
    assert json.loads(features.read_text())["chunk_length"] == 30
    with pytest.raises(EngineFailure, match="windows of 3000 frames"):
        BatchEncoder(config(tmp_path))
