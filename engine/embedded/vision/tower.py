"""The vision tower and the projector of a transformers model, without its language model: from pixels to embeddings."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3
from transformers import AutoModel
from transformers.configuration_utils import PreTrainedConfig

from engine.checkpoints.facts import ModelFacts
from engine.config import EncoderConfig
from engine.embedded.models.devices import device_of, dtype_of
from engine.embedded.models.transformers_models import load_config, load_weights
from engine.embedded.threads import compute_threads
from engine.embedded.vision.gpu import Graphs, Staging
from engine.embedded.vision.kept import KeptRows
from engine.embedded.vision.videos import Prepared
from engine.errors import EngineFailure
from engine.media import Dtype, RemoteRows
from engine.transfer.base import TransferError
from engine.transfer.shared_bytes import Data, shared_or_copied

DTYPE_NAMES: dict[torch.dtype, Dtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SAMPLES = 4096
"""Weights of each tensor that take part in the fingerprint."""

log = logging.getLogger(__name__)


class Tower:
    """Computes on the configuration's device, in its type. Raises EngineFailure if the folder has no such model, or a
    damaged one."""

    def __init__(self, config: EncoderConfig) -> None:
        self.device = device_of(config)
        self.dtype = dtype_of(config, self.device)
        torch.backends.cudnn.allow_tf32 = False  # where float32 is asked for it is meant
        self.dtype_name = DTYPE_NAMES[self.dtype]
        if self.device.type == "cpu":
            torch.set_num_threads(compute_threads(config.threads))
        hf_config, facts = load_config(config.model)
        self.hidden_size = facts.hidden_size
        shrink(hf_config)
        if config.load_format == "dummy":
            torch.manual_seed(0)
            model: Any = AutoModel.from_config(hf_config, dtype=self.dtype)  # type: ignore[no-untyped-call]
        else:
            model = _load(config.model, hf_config, self.dtype, facts)
        delattr(model, facts.vision.language)
        self.model = model.eval().to(self.device)
        self.graphs = Graphs(self.features)
        self._to_device, self._from_device = Staging(), Staging()
        self.kept = _kept_rows(config, self.device)
        """Memory for embeddings that stay here; None without."""
        self._keep_from = config.keep_from

    def fingerprint(self, more: str) -> str:
        """Return 32 hex digits that identify a sample of the weights, the type, and `more`."""
        return blake3(f"{self.dtype} {more}".encode() + sample_of(self.model.state_dict())).hexdigest(16)

    @torch.inference_mode()
    def encode(self, images: Sequence[Prepared]) -> list[Data | RemoteRows]:
        """The embeddings of images of equal shapes, [rows, hidden size] each, row by row. Raises EngineFailure."""
        counts = [image.rows for image in images]
        try:
            rows = self._compute([image.tensors for image in images])
            if rows.shape != (sum(counts), self.hidden_size):
                raise EngineFailure(
                    "the vision tower and the image processor do not agree on how many tokens an image is"
                )
            kept = [
                self.kept.put(part) if self.kept is not None and image.stay and part.nbytes >= self._keep_from else None
                for image, part in zip(images, torch.split(rows, counts), strict=True)
            ]
            here = torch.split(self._on_host(rows), counts) if None in kept else ()
        except torch.OutOfMemoryError as error:
            raise EngineFailure("the device has too little memory to encode these images") from error
        return [
            shared_or_copied(here[index].view(torch.uint8).numpy().data) if remote is None else remote
            for index, remote in enumerate(kept)
        ]

    def _compute(self, images: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return all rows of all images, on the device."""
        pixels = self._pixels([image["pixel_values"] for image in images])
        if self.device.type != "cpu" and images[0].keys() == {"pixel_values"}:
            return self.graphs(pixels)
        others = {
            name: torch.cat([image[name] for image in images]).to(self.device)
            for name in images[0].keys() - {"pixel_values"}
        }
        return self.features(pixels, **others)

    def features(self, pixel_values: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        features = self.model.get_image_features(pixel_values=pixel_values, **others, return_dict=True).pooler_output
        return torch.cat([feature.flatten(0, -2) for feature in features]).to(self.dtype)

    def _pixels(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Return the pixels of all images in the tower's type, on the device."""
        if self.device.type == "cpu":
            return torch.cat(images).to(self.dtype)
        count = sum(map(len, images))
        staged = self._to_device.tensor(torch.Size((count, *images[0].shape[1:])), self.dtype)
        return torch.cat(images, out=staged).to(self.device, non_blocking=True)

    def _on_host(self, rows: torch.Tensor) -> torch.Tensor:
        """Wait for the device and copy the rows; the copy is valid until the next call."""
        return rows if self.device.type == "cpu" else self._from_device.tensor(rows.shape, rows.dtype).copy_(rows)


def _kept_rows(config: EncoderConfig, device: torch.device) -> KeptRows | None:
    """Return memory for embeddings that stay here, if there is to be any and other processes can read it. Raises
    EngineFailure if there has to be."""
    if config.keep == "front" or (config.keep == "auto" and device.type == "cpu"):
        return None
    try:
        return KeptRows(config.keep_mb << 20, device, config.keep_seconds)
    except (TransferError, OSError, torch.OutOfMemoryError) as error:
        if config.keep == "direct":
            raise EngineFailure(f"EMBEDDING_TRANSFER=direct is impossible here: {error}") from error
        log.warning("no embeddings stay with the encoder: %s", error)
        return None


def sample_of(weights: Mapping[str, torch.Tensor]) -> bytes:
    """Return names, shapes and some values of all weights, which tell models apart."""
    digest = blake3()
    for name, tensor in weights.items():
        flat = tensor.flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.numpy().tobytes())
    return digest.digest()


def shrink(config: PreTrainedConfig) -> None:
    """Leave a language model of no layers and a vocabulary of one token, so that its weights are never read."""
    text: Any = config.get_text_config()
    text.num_hidden_layers = 0
    text.vocab_size = 1
    text.pad_token_id = None


def _load(folder: str, config: PreTrainedConfig, dtype: torch.dtype, facts: ModelFacts) -> Any:
    """Load the model with its shrunken language part, for which no tensor fits."""
    vision = facts.vision
    return load_weights(
        AutoModel,
        folder,
        facts,
        needs=lambda name: not name.startswith(vision.language),
        uses=lambda name: vision.text_tensor(name) is None,
        config=config,
        dtype=dtype,
    )
