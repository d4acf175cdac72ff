"""The model in training: which parameters are trained, and the two losses."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from smolvision.architecture import CONFIG, RANK, VISION, VOCABULARY, language_config, trained_modules
from smolvision.batches import Batch
from smolvision.conversations import IMAGE_TOKEN_ID
from smolvision.images import LABELS
from smolvision.lora import add_low_rank
from smolvision.student import ChatStudent, mean_loss


class Student(ChatStudent):
    """Tower, projector and low-rank adapters are trained in float32; SmolLM2 is frozen, in `dtype`.

    The tower is also trained on labels of patches, through linear heads that are not saved.
    """

    def __init__(self, base: Path, start: Path | None, dtype: torch.dtype) -> None:
        """Load SmolLM2 from the folder `base`. `start` is a file written by training, to continue from."""
        super().__init__()
        config = LlavaConfig(**CONFIG | {"text_config": language_config(base), "dtype": "float32"})
        self.model: Any = LlavaForConditionalGeneration(config)
        self.language: Any = self.model.model.language_model
        self.read_language(base, VOCABULARY, dtype)
        changes = add_low_rank(self.model, RANK, "model.language_model.", "language_model.model.")
        modules = trained_modules(self.model)
        self.tower = modules["vision_tower"]
        self.projector = modules["multi_modal_projector"]
        whole = {
            f"{name}.{part}": tensor for name, module in modules.items() for part, tensor in module.named_parameters()
        }
        self.trained = {**whole, **changes}
        self.heads = nn.Linear(VISION["hidden_size"], sum(LABELS.values()))
        self.continue_from(start)

    def look(self, images: torch.Tensor) -> torch.Tensor:
        """Return the tower's features [images, patches, hidden] of uint8 images, as LLaVA takes them."""
        pixels = images.permute(0, 3, 1, 2).float() / 127.5 - 1
        features: torch.Tensor = self.tower(pixels, output_hidden_states=True).hidden_states[-1]
        return features

    def patch_loss(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of all labels, and each label's accuracy where it is not 0."""
        parts = self.heads(features).float().split(list(LABELS.values()), dim=-1)
        loss, shares = features.new_zeros(()), []
        for part, target in zip(parts, labels.long().unbind(1), strict=True):
            loss = loss + mean_loss(part.flatten(0, 1), target.flatten())
            seen = target > 0
            shares.append(((part.argmax(-1) == target) & seen).sum() / seen.sum().clamp(min=1))
        return loss, torch.stack(shares).detach()

    def answer_loss(self, batch: Batch, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of the answers' tokens, and the share that is predicted correctly."""
        return self.loss_of_answers(batch.ids, batch.said, IMAGE_TOKEN_ID, self.projector(features))
