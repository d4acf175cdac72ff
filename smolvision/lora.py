"""Low-rank adapters (LoRA) for the linear layers of a part of a model, whose own weights stay frozen."""

import torch
from torch import nn
from torch.nn import functional


class LowRank(nn.Module):
    """A linear layer and its adapter `up @ down`, which is initially zero."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs]."""
        out: torch.Tensor = self.linear(x) + functional.linear(functional.linear(x, self.down), self.up)
        return out


def add_low_rank(model: nn.Module, rank: int, part: str, in_file: str) -> dict[str, nn.Parameter]:
    """Add an adapter to each linear layer of a part of a model; return their parameters by names in files.

    `part` is the prefix of the part's modules, `in_file` that of their names in files.
    """
    parts = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.startswith(part):
            changed = LowRank(module, rank)
            model.set_submodule(name, changed)
            written = in_file + name.removeprefix(part)
            parts |= {f"{written}.lora_down": changed.down, f"{written}.lora_up": changed.up}
    return parts
