"""Random weights for tests."""

import torch


def vary(model: torch.nn.Module) -> None:
    """Change biases and norms of heads, which are zeros and ones in a new model."""
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "q_norm.weight", "k_norm.weight")):
            parameter.data += torch.randn_like(parameter) * 0.2
