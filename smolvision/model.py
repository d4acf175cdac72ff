"""The model in training: which parameters are trained, and the two losses."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import LlavaConfig, LlavaForConditionalGeneration

from smolvision.architecture import CONFIG, RANK, VISION, VOCABULARY, language_config, trained_modules
from smolvision.batches import Batch
from smolvision.conversations import IMAGE_TOKEN_ID
from smolvision.images import LABELS
from smolvision.lora import add_low_rank


class Student(nn.Module):
    """Tower, projector and low-rank adapters are trained in float32; SmolLM2 is frozen, in `dtype`.

    The tower is also trained on labels of patches, through linear heads that are not saved.
    """

    def __init__(self, base: Path, start: Path | None, dtype: torch.dtype) -> None:
        """Load SmolLM2 from the folder `base`. `start` is a file written by training, to continue from."""
        super().__init__()
        config = LlavaConfig(**CONFIG | {"text_config": language_config(base), "dtype": "float32"})
        self.model: Any = LlavaForConditionalGeneration(config)
        self.language: Any = self.model.model.language_model
        self._read_language(load_file(base / "model.safetensors"), dtype)
        changes = add_low_rank(self.model, RANK, "model.language_model.", "language_model.model.")
        modules = trained_modules(self.model)
        self.tower = modules["vision_tower"]
        self.projector = modules["multi_modal_projector"]
        whole = {
            f"{name}.{part}": tensor for name, module in modules.items() for part, tensor in module.named_parameters()
        }
        self.trained: dict[str, nn.Parameter] = {**whole, **changes}
        """Trained parameters by their names in the file."""
        self.heads = nn.Linear(VISION["hidden_size"], sum(LABELS.values()))
        if start:
            for name, tensor in load_file(start).items():
                self.trained[name].data.copy_(tensor)

    def _read_language(self, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        tensors = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        rows = tensors["embed_tokens.weight"]
        tensors["embed_tokens.weight"] = functional.pad(rows, (0, 0, 0, VOCABULARY - len(rows)))
        self.language.load_state_dict(tensors)
        for parameter in self.language.parameters():  # buffers, the rotary frequencies, stay float32
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)

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
            loss = loss + _mean_loss(part.flatten(0, 1), target.flatten())
            seen = target > 0
            shares.append(((part.argmax(-1) == target) & seen).sum() / seen.sum().clamp(min=1))
        return loss, torch.stack(shares).detach()

    def answer_loss(self, batch: Batch, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of the answers' tokens, and the share that is predicted correctly."""
        table = self.language.embed_tokens.weight
        embeddings = functional.embedding(batch.ids, table)
        places = (batch.ids == IMAGE_TOKEN_ID).unsqueeze(-1).expand_as(embeddings)
        embeddings = embeddings.masked_scatter(places, self.projector(features).to(embeddings.dtype))
        hidden = self.language(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        said = batch.said[:, 1:]
        logits = functional.linear(hidden[:, :-1][said], table)
        targets = batch.ids[:, 1:][said]
        return _mean_loss(logits.float(), targets), (logits.argmax(-1) == targets).float().mean().detach()


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy; 0 without targets."""
    return functional.cross_entropy(logits, targets, reduction="sum") / max(1, targets.numel())
