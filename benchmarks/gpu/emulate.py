"""Emulate eight bits in transformers: its own model with only the roundings of QUANTIZATION and KV_CACHE_DTYPE.

Weights have a scale per output channel, activations one per token; keys and values are clamped without a scale.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

LARGEST = 448.0
"""Largest value of float8_e4m3fn."""
_ROUNDED_CACHE = "rounded_cache"


def emulate(model: Any, weights: bool, cache: bool) -> Any:
    """Change the model in place and return it; `weights` also rounds the inputs of linear layers."""
    if weights:
        for linear in (part for part in model.model.layers.modules() if isinstance(part, torch.nn.Linear)):
            linear.weight.data = scaled(linear.weight.data)
            linear.register_forward_pre_hook(lambda _, inputs: (scaled(inputs[0]),))
    if cache:
        model.set_attn_implementation(_ROUNDED_CACHE)
    return model


def scaled(values: torch.Tensor) -> torch.Tensor:
    """Return `values` rounded to eight bits with a scale per row, which maps the row's largest value to LARGEST."""
    scales = values.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (clamped(values.float() / scales).float() * scales).to(values.dtype)


def clamped(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(values.dtype)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    return sdpa_attention_forward(module, query, clamped(key), clamped(value), *arguments, **options)


AttentionInterface.register(_ROUNDED_CACHE, _attend)
