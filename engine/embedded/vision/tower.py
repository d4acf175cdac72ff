"""The vision tower and the projector of a transformers model, without its language model: from pixels to embeddings."""

from collections.abc import Sequence
from typing import Any

import torch
from blake3 import blake3
from transformers import AutoConfig, AutoModel
from transformers.utils import logging as transformers_logging

from engine.config import EncoderConfig
from engine.embedded.models.load import device_of, dtype_of
from engine.embedded.threads import compute_threads
from engine.embedded.vision.gpu import Graphs, Staging
from engine.embedded.vision.processing import Prepared
from engine.errors import EngineFailure
from engine.media import Dtype
from engine.transfer.shared_bytes import Data, shared_or_copied

_LANGUAGE_MODELS = ("language_model", "text_model")
"""Where the families' models keep it."""
_NAMES: dict[torch.dtype, Dtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SAMPLES = 4096
"""Weights of each tensor that take part in the fingerprint."""


class Tower:
    """Computes on the configuration's device, in its type. Raises EngineFailure if the folder has no such model."""

    def __init__(self, config: EncoderConfig) -> None:
        self.device = device_of(config)
        self.dtype = dtype_of(config, self.device)
        torch.backends.cudnn.allow_tf32 = False  # where float32 is asked for it is meant
        self.dtype_name = _NAMES[self.dtype]
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(config.threads))
        self.hidden_size: int = (
            AutoConfig.from_pretrained(config.model, local_files_only=True).get_text_config().hidden_size
        )
        load = _random if config.load_format == "dummy" else _load
        self._model = _without_language(load(config.model, self.dtype)).to(self.device)
        self._graphs = Graphs(self._features)
        self._to_device, self._from_device = Staging(), Staging()

    def fingerprint(self, more: str) -> str:
        """32 hex digits that stand for the weights, of which a sample is taken, for the type, and for `more`."""
        digest = blake3(f"{self.dtype} {more}".encode())
        for name, weights in self._model.state_dict().items():
            flat = weights.flatten()
            sample = flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu()
            digest.update(f"{name} {tuple(weights.shape)}".encode() + sample.numpy().tobytes())
        return digest.hexdigest(16)

    @torch.inference_mode()
    def encode(self, images: Sequence[Prepared]) -> list[Data]:
        """The embeddings of images of equal shapes, [rows, hidden size] each, row by row. Raises EngineFailure."""
        try:
            rows = self._on_host(self._compute([image.tensors for image in images]))
        except torch.OutOfMemoryError as error:
            raise EngineFailure("the device has too little memory to encode these images") from error
        counts = [image.rows for image in images]
        if rows.shape != (sum(counts), self.hidden_size):
            raise EngineFailure("the vision tower and the image processor do not agree on how many tokens an image is")
        return [_bytes_of(part) for part in torch.split(rows, counts)]

    def _compute(self, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """All rows of all images, on the device."""
        pixels = self._pixels([image["pixel_values"] for image in images])
        if self.device.type != "cpu" and images[0].keys() == {"pixel_values"}:
            return self._graphs(pixels)
        others = {
            name: torch.cat([image[name] for image in images]).to(self.device)
            for name in images[0].keys() - {"pixel_values"}
        }
        return self._features(pixels, **others)

    def _features(self, pixel_values: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        features = self._model.get_image_features(pixel_values=pixel_values, **others, return_dict=True).pooler_output
        return torch.cat([feature.flatten(0, -2) for feature in features]).to(self.dtype)

    def _pixels(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Of all images, in the tower's type, on the device."""
        if self.device.type == "cpu":
            return torch.cat(images).to(self.dtype)
        count = sum(map(len, images))
        staged = self._to_device.tensor(torch.Size((count, *images[0].shape[1:])), self.dtype)
        return torch.cat(images, out=staged).to(self.device, non_blocking=True)

    def _on_host(self, rows: torch.Tensor) -> torch.Tensor:
        """Valid until the next call. Waits for the device."""
        return rows if self.device.type == "cpu" else self._from_device.tensor(rows.shape, rows.dtype).copy_(rows)


def _bytes_of(values: torch.Tensor) -> Data:
    return shared_or_copied(values.view(torch.uint8).numpy().data)


def _small(folder: str) -> Any:
    """The model's configuration with a language model of no layers and one word."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    return config


def _random(folder: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(_small(folder), dtype=dtype)  # type: ignore[no-untyped-call]


def _load(folder: str, dtype: torch.dtype) -> Any:
    """With a small language model, so that its weights are never read.

    What the files have beyond that is left alone, what has another size counts as missing, and nothing else may be missing.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        model, report = AutoModel.from_pretrained(
            folder,
            config=_small(folder),
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineFailure(f"the vision tower cannot be loaded: {error}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    lost = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if lost := [key for key in lost if not key.startswith(_LANGUAGE_MODELS)]:
        raise EngineFailure(f"the model's files lack {len(lost)} weights of the vision tower, such as {min(lost)}")
    return model


def _without_language(model: Any) -> Any:
    for name in _LANGUAGE_MODELS:
        if name in dict(model.named_children()):
            delattr(model, name)
    return model.eval()
