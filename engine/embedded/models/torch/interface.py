"""transformers' attention interface: the seam between its model code and our attention.

transformers calls `paged_attention` from every attention layer, with the queries, keys and values of the step's flat
tokens. It hands them to the `AttentionBackend` of the step.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from engine.embedded.models.torch.attention import AttentionBackend

ATTENTION_NAME = "trellis_paged"
_OPTIONS = ("sliding_window", "softcap", "s_aux")
"""Further options that layers may pass: the window, a bound on scores, sinks."""


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    paged: AttentionBackend,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface for one row of flat tokens: [1, heads, tokens, head_dim] in, [1, tokens,
    heads, head_dim] out."""
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    options = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    return paged(module.layer_idx, query, key, value, scaling, **options).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
