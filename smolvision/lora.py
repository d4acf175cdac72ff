"""Low-rank changes of a language model's linear layers, whose own weights stay as they are."""

import torch
from torch import nn
from torch.nn import functional

_MODULES = "model.language_model."
_FILES = "language_model.model."
"""What the language model is called in the model, and in files."""


class LowRank(nn.Module):
    """A linear layer and its change, `up @ down`, which begins as nothing."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        out: torch.Tensor = self.linear(x) + functional.linear(functional.linear(x, self.down), self.up)
        return out


def add_low_rank(model: nn.Module, rank: int) -> dict[str, nn.Parameter]:
    """Put a change on each linear layer of the language model of a LLaVA; the changes' parts by the names they have in files."""
    parts = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.startswith(_MODULES):
            changed = LowRank(module, rank)
            model.set_submodule(name, changed)
            in_file = _FILES + name.removeprefix(_MODULES)
            parts |= {f"{in_file}.lora_down": changed.down, f"{in_file}.lora_up": changed.up}
    return parts
