"""The audio tower of a language model: Whisper's encoder and a projector, as in Audio Flamingo 3.

A recording is cut into windows, each of which is encoded by itself. Results equal those of transformers'
`AudioFlamingo3Processor` and model, but silence that fills a window is not computed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from blake3 import blake3
from torch.nn import functional
from transformers import AutoModel, WhisperFeatureExtractor

from engine.checkpoints.families import AudioPart
from engine.checkpoints.headers import read_headers
from engine.config import EncoderConfig
from engine.embedded.models.devices import device_of, dtype_of
from engine.embedded.models.transformers_models import load_config
from engine.embedded.threads import compute_threads
from engine.embedded.vision.tower import DTYPE_NAMES, sample_of, shrink
from engine.embedded.vision.videos import Prepared
from engine.embedded.whisper.encoder import AudioEncoder, Linear, Weights, load_weights, missing_tensors
from engine.errors import EngineFailure, InvalidRequest
from engine.kit.audio_file import decode_audio
from engine.kit.log_mel import HOP, SAMPLE_RATE, log_mel
from engine.media import MediaInput
from engine.transfer.shared_bytes import Data, shared_or_copied

_MARGIN = 4
"""Frames of silence computed behind a recording, as far as the convolutions look."""


class AudioProcessing:
    """Recordings as log-mel features, and the text that replaces a placeholder.

    `prepare` may run in several threads at once.
    """

    def __init__(self, config: EncoderConfig, audio: AudioPart, max_position: int) -> None:
        """`max_position` is the number of the encoder's positions in a window. Raises EngineFailure."""
        self._max_seconds = config.max_audio_seconds
        try:
            features = WhisperFeatureExtractor.from_pretrained(config.model, local_files_only=True)
            base: Any = transformers.AudioFlamingo3Processor
            settings: dict[str, Any] = base.get_processor_dict(config.model, local_files_only=True)[0]
        except Exception as error:  # transformers stumbles over wrong files in many ways
            raise EngineFailure(f"the audio processor of {config.model} cannot be loaded: {error}") from error
        used = (features.sampling_rate, features.hop_length, features.n_fft, features.nb_max_frames)
        if used != (SAMPLE_RATE, HOP, 400, 2 * max_position):
            raise EngineFailure(
                f"the audio processor of {config.model} has windows of {used[3]} frames of {used[2]} samples every "
                f"{used[1]} at {used[0]} Hz; only {2 * max_position} of 400 every {HOP} at {SAMPLE_RATE} are supported"
            )
        self._window: int = features.n_samples
        self._bins: int = features.feature_size
        self.placeholder: str = settings.get("audio_token", audio.audio_token)
        """Text that the chat template writes for a recording, and of an audio token."""
        self.description = json.dumps([self._window, self._bins, self.placeholder])
        """All settings that change the result, as JSON."""

    def prepare(self, medium: MediaInput, work: Callable[[], bool] = lambda: True) -> Prepared:
        """Decode a file, unless `work` returns False before its end. Tensors are the features of each window, and
        `positions`, how many of each are speech. Raises InvalidRequest."""
        samples = decode_audio(medium.data, self._max_seconds, work)
        windows = [samples[start : start + self._window] for start in range(0, len(samples), self._window)]
        positions = [(-(-len(window) // HOP) - 1) // 2 + 1 for window in windows]
        rows = sum(count // 2 for count in positions)
        if not rows:
            raise InvalidRequest("the audio is too short", "audio")
        tensors = {str(place): torch.from_numpy(self._features(window)) for place, window in enumerate(windows)}
        tensors["positions"] = torch.tensor(positions)
        return Prepared(tensors, self.placeholder * rows, rows, (0, 0, 0))

    def _features(self, window: np.ndarray) -> np.ndarray:
        """Return [bins, frames], with as much silence behind the recording as the encoder looks at."""
        whole = min(self._window, -(-len(window) // HOP) * HOP + _MARGIN * HOP)
        return log_mel(np.pad(window, (0, whole - len(window))), self._bins)


class AudioTower:
    """Computes on the configuration's device, in its type. Raises EngineFailure if the folder has no such model, or a
    damaged one."""

    def __init__(self, config: EncoderConfig) -> None:
        self.device = device_of(config)
        self.dtype = dtype_of(config, self.device)
        self.dtype_name = DTYPE_NAMES[self.dtype]
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(config.threads))
        hf_config, facts = load_config(config.model)
        self.hidden_size = facts.hidden_size
        part, audio, act = facts.family.audio, hf_config.audio_config, hf_config.projector_hidden_act
        assert part is not None
        if act != "gelu" or audio.activation_function != "gelu" or audio.scale_embedding:
            raise EngineFailure(f"the audio encoder of {config.model} has activations or scales that are not supported")
        encoder, projector = part.tower
        weights = self._weights(config, hf_config)
        with missing_tensors(""):
            self.encoder = AudioEncoder(_within(weights, encoder), audio.num_hidden_layers, audio.num_attention_heads)
            self._linears = [Linear.of(weights, f"{projector}.linear_{number}") for number in (1, 2)]
        shapes = [tuple(linear.weight.shape) for linear in self._linears]
        width = self.hidden_size
        if self.encoder.positions != audio.max_source_positions or shapes != [
            (width, self.encoder.width),
            (width, width),
        ]:
            raise EngineFailure(f"the safetensors of {config.model} do not have the shapes that config.json asks for")
        self._sample = blake3(sample_of(weights))

    def fingerprint(self, more: str) -> str:
        """Return 32 hex digits that identify a sample of the weights, the type, and `more`."""
        digest = self._sample.copy()
        digest.update(f"{self.dtype} {more}".encode())
        return digest.hexdigest(16)

    @torch.inference_mode()
    def encode(self, recordings: Sequence[Prepared]) -> list[Data]:
        """The embeddings of recordings, [rows, hidden size] each. Raises EngineFailure."""
        try:
            return [self._embed(recording.tensors) for recording in recordings]
        except torch.OutOfMemoryError as error:
            raise EngineFailure("the device has too little memory to encode this audio") from error

    def _embed(self, tensors: dict[str, torch.Tensor]) -> Data:
        rows = []
        for place, positions in enumerate(tensors["positions"].tolist()):
            x = self.encoder.averaged(tensors[str(place)][None].to(self.device), positions)
            first, second = self._linears
            rows.append(second(functional.gelu(first(x)))[0])
        return shared_or_copied(torch.cat(rows).cpu().view(torch.uint8).numpy().data)

    def _weights(self, config: EncoderConfig, hf_config: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of the encoder and the projector, by names that begin with those."""
        if config.load_format == "dummy":
            torch.manual_seed(0)
            shrink(hf_config)
            model: Any = AutoModel.from_config(hf_config, dtype=self.dtype)  # type: ignore[no-untyped-call]
            return {name: tensor.detach().to(self.device) for name, tensor in model.named_parameters()}
        folder = Path(config.model)
        old = any(name.startswith("audio_tower.") for name in read_headers(folder))
        return {
            f"{part}.{name}": tensor
            for part in ("audio_tower", "multi_modal_projector")
            for name, tensor in load_weights(
                folder, f"{'' if old else 'model.'}{part}.", self.dtype, self.device
            ).items()
        }


def _within(weights: Mapping[str, torch.Tensor], part: str) -> Weights:
    return {name.removeprefix(f"{part}."): tensor for name, tensor in weights.items() if name.startswith(f"{part}.")}
