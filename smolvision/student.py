"""The shared part of the models in training: a frozen language model, and the loss of its answers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional


class ChatStudent(nn.Module):
    """A model in training: a frozen language model, and parts that are trained in float32."""

    language: Any
    trained: dict[str, nn.Parameter]
    """Trained parameters by their names in the file."""

    def read_language(self, base: Path, vocabulary: int, dtype: torch.dtype) -> None:
        """Load SmolLM2 from the folder `base`, with zeros for additional tokens, and freeze it."""
        tensors = {
            name.removeprefix("model."): tensor for name, tensor in load_file(base / "model.safetensors").items()
        }
        rows = tensors["embed_tokens.weight"]
        tensors["embed_tokens.weight"] = functional.pad(rows, (0, 0, 0, vocabulary - len(rows)))
        self.language.load_state_dict(tensors)
        self.freeze_language(dtype)

    def freeze_language(self, dtype: torch.dtype) -> None:
        """Round the language model to `dtype`, and do not train it."""
        for parameter in self.language.parameters():  # buffers, the rotary frequencies, stay float32
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)

    def continue_from(self, start: Path | None) -> None:
        """Load trained parameters from a file written by training, if there is one.

        Adapters may have a higher rank than in the file: the others begin as new ones do, and change nothing yet.
        """
        if start:
            for name, tensor in load_file(start).items():
                self.trained[name].data[tuple(map(slice, tensor.shape))] = tensor

    def loss_of_answers(
        self, ids: torch.Tensor, said: torch.Tensor, media_token: int, media: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of the answers' tokens, and the share that is predicted correctly.

        `ids` are int64 [chats, length]; `said`, bool of the same shape, marks those of answers. `media`, [..., hidden],
        take the places of `media_token` in order.
        """
        table = self.language.embed_tokens.weight
        embeddings = functional.embedding(ids, table)
        places = (ids == media_token).unsqueeze(-1).expand_as(embeddings)
        embeddings = embeddings.masked_scatter(places, media.to(embeddings.dtype))
        hidden = self.language(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        logits = functional.linear(hidden[:, :-1][said[:, 1:]], table)
        targets = ids[:, 1:][said[:, 1:]]
        return mean_loss(logits.float(), targets), (logits.argmax(-1) == targets).float().mean().detach()


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy; 0 without targets."""
    return functional.cross_entropy(logits, targets, reduction="sum") / max(1, targets.numel())
