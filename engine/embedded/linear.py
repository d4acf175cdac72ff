"""Matrix products on a CPU with weights laid out once, twice over: for few rows and for many.

Few rows are bound by memory: FBGEMM multiplies float32 activations with float16 weights, half the bytes, and adds up in float32. Weights
that come from bfloat16 lose nothing by that, so the result is that of float32. Many rows are bound by arithmetic: oneDNN in its blocked
layout, as torch's own compiler freezes a model. Linears of one input become one product. Figures are in docs/log.md.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn

FEW_ROWS = 16
LAYOUT_ROWS = 512
"""The number of rows that oneDNN chooses the layout for."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linears that take the same input, as transformers' decoders spell them."""
_multiply_half = torch.ops.quantized.linear_dynamic_fp16.default  # the overload itself: looking it up takes as long as a small product
_TINIEST_STEP = 6e-8
"""Spacing of float16 below its smallest normal number; so little is lost in float32's sums."""


class PackedLinear(nn.Module):
    """`nn.Linear` for inference with float32 activations; keeps neither `weight` [out, in] nor a reference to it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, few_only: bool = False) -> None:
        """`few_only`: never many rows, or seldom: the wide layout is left out where the narrow one can serve."""
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


class _Joined:
    """Linears of one input as one product, computed when the first of them is called."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        bias = torch.cat([linear.bias for linear in linears]) if linears[0].bias is not None else None
        self._linear = PackedLinear(torch.cat([linear.weight for linear in linears]), bias)
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What linear `index` makes of `x`; nothing is kept once the last of them was asked."""
        if self._input is not x:
            self._input, self._outputs = x, torch.split_with_sizes(self._linear.forward(x), self._sizes, -1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output


class _JoinedPart(nn.Module):
    """One linear of a `_Joined`, where the model looks for it."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()
        self._joined, self._index = joined, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._joined.output(self._index, x)


def pack_linears(module: nn.Module, head: nn.Module) -> None:
    """Replace every float32 `nn.Linear` below `module`, where torch has the libraries for it; `head` makes the logits, of few rows."""
    if not torch._C._has_mkldnn or "fbgemm" not in torch.backends.quantized.supported_engines:
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # packing itself is done by one thread
        list(pool.map(_replace, list(_replacements(module, head))))


def _replace(replacement: Callable[[], None]) -> None:
    with torch.inference_mode():
        replacement()


def _replacements(module: nn.Module, head: nn.Module) -> Iterator[Callable[[], None]]:
    for parent in module.modules():
        names = {name for name, child in parent.named_children() if _is_float32_linear(child)}
        for group in _JOINED:
            if names.issuperset(group) and len({getattr(parent, name).bias is None for name in group}) == 1:
                yield partial(_join, parent, group)
                names.difference_update(group)
        for name in names:
            yield partial(_pack, parent, name, getattr(parent, name) is head)


def _join(parent: nn.Module, names: Sequence[str]) -> None:
    joined = _Joined([getattr(parent, name) for name in names])
    for index, name in enumerate(names):
        setattr(parent, name, _JoinedPart(joined, index))


def _pack(parent: nn.Module, name: str, few_only: bool) -> None:
    linear = getattr(parent, name)
    bias = None if linear.bias is None else linear.bias.detach()
    setattr(parent, name, PackedLinear(linear.weight.detach(), bias, few_only))


def _is_float32_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.dtype == torch.float32


def _fits_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds the weights as well as float32 does: true of those that were bfloat16 and are not huge."""
    return float(torch.linalg.vector_norm(weight - weight.half(), torch.inf)) < _TINIEST_STEP
