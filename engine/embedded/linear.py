"""Matrix products on a CPU with weights laid out once, twice over: for few rows and for many.

Few rows are bound by memory: FBGEMM multiplies float32 activations with float16 weights, half the bytes, and adds up in float32. Weights
that come from bfloat16 lose nothing by that, so the result is that of float32. Many rows are bound by arithmetic: oneDNN in its blocked
layout, as torch's own compiler freezes a model. Figures are in docs/log.md.
"""

import torch
from torch import nn

FEW_ROWS = 16
LAYOUT_ROWS = 512
"""The number of rows that oneDNN chooses the layout for."""
_TINIEST = 6.2e-5
"""Below float16's smallest normal number: its spacing there, 6e-8, is lost in float32's sums."""


class PackedLinear(nn.Module):
    """`nn.Linear` for inference with float32 activations; the original weight is not kept."""

    def __init__(self, linear: nn.Linear, few_only: bool) -> None:
        """`few_only`: never many rows, or seldom: the wide layout is left out where the narrow one can serve."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._few = torch.ops.quantized.linear_prepack_fp16(weight, self._bias) if _fits_half(weight) else None
        narrow = few_only and self._few is not None
        self._many = None if narrow else torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        if self._many is None or (self._few is not None and x.shape[-2] <= FEW_ROWS):
            out = torch.ops.quantized.linear_dynamic_fp16(x, self._few)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self._many, self._bias, "none", [], "")
        return out


def pack_linears(module: nn.Module, head: nn.Module) -> None:
    """Replace every float32 `nn.Linear` below `module`, where torch has the libraries for it; `head` makes the logits, of few rows."""
    if not torch._C._has_mkldnn or "fbgemm" not in torch.backends.quantized.supported_engines:
        return
    for child_name, child in module.named_children():
        if type(child) is nn.Linear and child.weight.dtype == torch.float32:
            with torch.inference_mode():
                setattr(module, child_name, PackedLinear(child, few_only=child is head))
        else:
            pack_linears(child, head)


def _fits_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds the weights as well as float32 does: true of those that were bfloat16 and are not huge."""
    half = weight.half().float()
    return bool(((half == weight) | (weight.abs() < _TINIEST)).all())
