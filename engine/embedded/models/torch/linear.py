"""Matrix products on a CPU with weights laid out once, twice over: for few rows and for many.

Few rows are bound by memory: FBGEMM multiplies float32 activations with float16 weights, half the bytes, and adds up in
float32. Weights that come from bfloat16 lose nothing by that, so the result is that of float32. Many rows are bound by
arithmetic: oneDNN in its blocked layout, as torch's own compiler freezes a model. Linears of one input become one
product. Figures are in docs/log.md.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

FEW_ROWS = 16
LAYOUT_ROWS = 512
"""The number of rows that oneDNN chooses the layout for."""
_multiply_half = (
    torch.ops.quantized.linear_dynamic_fp16.default
)  # the overload itself: looking it up takes as long as a small product
_TINIEST_STEP = 6e-8
"""Spacing of float16 below its smallest normal number; so little is lost in float32's sums."""


class PackedLinear(nn.Module):
    """`nn.Linear` for inference with float32 activations; keeps neither `weight` [out, in] nor a reference to it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, few_only: bool = False) -> None:
        """`few_only`: the linear seldom has many rows; leave out the layout for them if the one for few rows can
        serve."""
        super().__init__()
        self._bias = bias
        self._few = torch.ops.quantized.linear_prepack_fp16(weight, bias) if _fits_half(weight) else None
        narrow = few_only and self._few is not None
        self._many = None if narrow else torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        if self._many is None or (self._few is not None and x.shape[-2] <= FEW_ROWS):
            out = _multiply_half(x, self._few)
        else:
            out = torch.ops.mkldnn._linear_pointwise.default(x, self._many, self._bias, "none", [], "")
        return out


def pack_joined(linears: Sequence[nn.Linear]) -> PackedLinear:
    """Join linears of the same input into one; their outputs lie side by side."""
    bias = torch.cat([linear.bias for linear in linears]).detach() if linears[0].bias is not None else None
    return PackedLinear(torch.cat([linear.weight for linear in linears]).detach(), bias)


def replacements(model: nn.Module, head: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield functions that replace every float32 `nn.Linear` below `model`, one each. `head` computes the logits, of
    few rows."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if is_float32_linear(child):
                yield partial(_replace, parent, name, child is head)


def _replace(parent: nn.Module, name: str, few_only: bool) -> None:
    linear = getattr(parent, name)
    bias = None if linear.bias is None else linear.bias.detach()
    setattr(parent, name, PackedLinear(linear.weight.detach(), bias, few_only))


def is_float32_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.dtype == torch.float32


def can_pack() -> bool:
    """Return whether this build of torch has the libraries."""
    return bool(torch._C._has_mkldnn) and "fbgemm" in torch.backends.quantized.supported_engines


def _fits_half(weight: torch.Tensor) -> bool:
    """Return whether float16 holds the weights as well as float32 does: true of weights that were bfloat16 and are
    not huge."""
    return float(torch.linalg.vector_norm(weight - weight.half(), torch.inf)) < _TINIEST_STEP
