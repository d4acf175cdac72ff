"""Rotary position embedding on a CPU in half the operations; which counts where a step has one token, as in `norm.py`."""

import functools
import sys
from typing import Any

import torch
from torch import nn

_FUNCTION = "apply_rotary_pos_emb"


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers' `apply_rotary_pos_emb` computes: x · cos + (-x₂, x₁) · sin, for queries and keys at once.

    `q` [1, heads, tokens, head_dim], `k` [1, kv_heads, tokens, head_dim], `cos` and `sin` [1, tokens, head_dim], whose halves are equal.
    """
    both = torch.cat((q, k), dim=1)
    half = both.shape[-1] // 2
    out = torch.addcmul(both * cos.unsqueeze(1), both.roll(half, -1), (sin * _signs(half)).unsqueeze(1))
    rotated_q, rotated_k = torch.split_with_sizes(out, (q.shape[1], k.shape[1]), 1)
    return rotated_q, rotated_k


@functools.cache
def _signs(half: int) -> torch.Tensor:
    return torch.cat((-torch.ones(half), torch.ones(half)))


def replace_rotary(model: nn.Module) -> None:
    """Have the code of the model's class use `rotate`, if its own function computes the same; there is one for all its models."""
    code: Any = sys.modules[type(model).__module__]
    own = getattr(code, _FUNCTION, None)
    if own is not None and _is_rotate(own):
        setattr(code, _FUNCTION, rotate)


def _is_rotate(function: Any) -> bool:
    q, k = torch.linspace(-1, 1, 96).view(1, 4, 3, 8), torch.linspace(1, 2, 48).view(1, 2, 3, 8)
    angles = torch.linspace(0, 1, 12).view(1, 3, 4).repeat(1, 1, 2)
    try:
        expected = function(q, k, angles.cos(), angles.sin())
    except (RuntimeError, TypeError):
        return False
    return all(torch.allclose(mine, its) for mine, its in zip(rotate(q, k, angles.cos(), angles.sin()), expected, strict=True))
