"""The model in training: which parameters are trained, and the loss."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from smolvideo.architecture import CONFIG, IMAGE_TOKEN_ID, RENAMED, TEXT_RANK, TOWER_RANK
from smolvideo.chats import Batch
from smolvision.lora import add_low_rank
from smolvision.student import ChatStudent

_TEXT = "model.text_model."
_TOWER = "model.vision_model."


class Student(ChatStudent):
    """The connector, the tower's last norm and low-rank adapters are trained in float32; smolvision is frozen."""

    def __init__(self, base: Path, start: Path | None, dtype: torch.dtype) -> None:
        """Load smolvision from its merged folder, its language model in `dtype`. `start` is a file written by training,
        to continue from."""
        super().__init__()
        text = json.loads((base / "config.json").read_text())["text_config"] | CONFIG["text_config"]
        config = SmolVLMConfig(**CONFIG | {"text_config": text, "dtype": "float32"})
        self.model: Any = SmolVLMForConditionalGeneration(config)
        self._read(load_file(base / "model.safetensors"))
        self.requires_grad_(False)
        inner = self.model.model
        self.language: Any = inner.text_model
        self.tower: Any = inner.vision_model
        self.connector: Any = inner.connector
        self.freeze_language(dtype)
        whole = {
            f"{name}.{part}": tensor
            for name, module in (
                ("model.connector", self.connector),
                ("model.vision_model.post_layernorm", self.tower.post_layernorm),
            )
            for part, tensor in module.named_parameters()
        }
        changes = add_low_rank(self.model, TEXT_RANK, _TEXT, _TEXT) | add_low_rank(
            self.model, TOWER_RANK, _TOWER, _TOWER
        )
        self.trained = {**whole, **changes}
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.continue_from(start)

    def _read(self, weights: dict[str, torch.Tensor]) -> None:
        tensors = {
            new + name.removeprefix(prefix): tensor.float()
            for name, tensor in weights.items()
            for prefix, new in RENAMED.items()
            if name.startswith(prefix)
        }
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        fresh = {name for name in missing if not name.startswith(("model.connector.", "lm_head."))}
        assert not fresh and not unexpected, (fresh, unexpected)

    def look(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return tokens [pictures, 16, hidden] of uint8 pictures."""
        pixels = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
        seen: torch.Tensor = self.connector(self.tower(pixel_values=pixels).last_hidden_state)
        return seen

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of the answers' tokens, and the share that is predicted correctly."""
        return self.loss_of_answers(batch.ids, batch.said, IMAGE_TOKEN_ID, self.look(batch.pictures))
