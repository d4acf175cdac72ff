"""What eight bits cost by themselves: transformers' model with the roundings of QUANTIZATION and KV_CACHE_DTYPE, and nothing else of ours.

Weights have a scale for each output channel, activations one for each token; keys and values have none, and are clamped.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

LARGEST = 448.0
"""Of float8_e4m3fn."""
_ROUNDED_CACHE = "rounded_cache"


def emulate(model: Any, weights: bool, cache: bool) -> Any:
    """The model, changed in place: `weights` also rounds what they are multiplied by."""
    if weights:
        for linear in (part for part in model.model.layers.modules() if isinstance(part, torch.nn.Linear)):
            linear.weight.data = scaled(linear.weight.data)
            linear.register_forward_pre_hook(lambda _, inputs: (scaled(inputs[0]),))
    if cache:
        model.set_attn_implementation(_ROUNDED_CACHE)
    return model


def scaled(values: torch.Tensor) -> torch.Tensor:
    """`values` rounded to eight bits, with a scale for each row that makes its largest value the largest there is."""
    scales = values.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (clamped(values.float() / scales).float() * scales).to(values.dtype)


def clamped(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(values.dtype)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    return sdpa_attention_forward(module, query, clamped(key), clamped(value), *arguments, **options)


AttentionInterface.register(_ROUNDED_CACHE, _attend)
