"""The model's configuration, and the file that holds all trained weights.

The model is an `AudioFlamingo3ForConditionalGeneration`: Whisper-tiny.en's encoder over windows of ten seconds,
averages of two neighbours (25 vectors a second), a projector of two layers, and SmolLM2. The file has the projector,
and a pair `lora_down`, `lora_up` for each linear layer of the language model. Its metadata says which tensors come from
Whisper, and holds the other files of the model folder; `engine/checkpoints/merge.py` documents the format.
"""

import json
from pathlib import Path
from typing import Any

import torch

from smolaudio.conversations import AUDIO_TOKEN, AUDIO_TOKEN_ID, TEMPLATE
from smolvision.architecture import write

RANK = 8
VOCABULARY = 49280
"""SmolLM2's 49152 tokens and the audio token, padded to a multiple of 128."""
WINDOW_SECONDS = 10
ENCODER: dict[str, Any] = {
    "model_type": "audioflamingo3_encoder",
    "num_mel_bins": 80,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_source_positions": 50 * WINDOW_SECONDS,
}
CONFIG: dict[str, Any] = {
    "architectures": ["AudioFlamingo3ForConditionalGeneration"],
    "model_type": "audioflamingo3",
    "dtype": "bfloat16",
    "audio_token_id": AUDIO_TOKEN_ID,
    "projector_hidden_act": "gelu",
    "projector_bias": True,
    "tie_word_embeddings": True,
    "audio_config": ENCODER,
    "text_config": {"vocab_size": VOCABULARY},
}
FEATURES: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": WINDOW_SECONDS,
    "return_attention_mask": True,
}
_PROCESSOR = {"processor_class": "AudioFlamingo3Processor", "audio_token": AUDIO_TOKEN, "max_audio_len": 600}
_WHISPER = "model.encoder."
"""Prefix of the encoder in a Whisper model's file."""


def language_config(base: Path) -> dict[str, Any]:
    """Return SmolLM2's configuration with room for the audio token."""
    config: dict[str, Any] = json.loads((base / "config.json").read_text())
    return config | CONFIG["text_config"]


def files() -> dict[str, Any]:
    """Return the other files of the model folder by name: JSON objects and text."""
    return {
        "config.json": CONFIG,
        "preprocessor_config.json": {**FEATURES, "processor_class": "AudioFlamingo3Processor"},
        "processor_config.json": _PROCESSOR,
        "chat_template.jinja": TEMPLATE,
    }


def taken(encoder: torch.nn.Module) -> dict[str, Any]:
    """Return which tensors of Whisper's file the encoder has, with the shapes to which they are cut."""
    return {f"audio_tower.{name}": [_WHISPER + name, [*tensor.shape]] for name, tensor in encoder.named_parameters()}


def save(path: Path, tensors: dict[str, torch.nn.Parameter], encoder: torch.nn.Module, facts: dict[str, str]) -> None:
    """Write trained tensors as bfloat16, with `facts` as metadata. The file at `path` is replaced atomically."""
    metadata = {
        "format": "pt",
        "tokens": json.dumps([AUDIO_TOKEN]),
        "files": json.dumps(files()),
        "taken": json.dumps(taken(encoder)),
        **facts,
    }
    write(path, tensors, metadata)
