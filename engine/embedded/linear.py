"""Matrix products on a CPU with weights laid out once for oneDNN, as torch's own compiler does when it freezes a model.

With float32 weights and one to sixteen rows they take about half the time of `nn.Linear` (docs/log.md).
"""

import torch
from torch import nn

LAYOUT_ROWS = 512
"""The number of rows that oneDNN chooses the layout for. The layout for many rows is the fastest, or as fast, for few rows too."""


class PackedLinear(nn.Module):
    """`nn.Linear` for inference; the weight is in oneDNN's blocked layout and the original is gone."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), LAYOUT_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def pack_linears(module: nn.Module) -> None:
    """Replace every float32 `nn.Linear` below `module`."""
    if not torch._C._has_mkldnn:
        return
    for child_name, child in module.named_children():
        if type(child) is nn.Linear and child.weight.dtype == torch.float32:
            with torch.inference_mode():
                setattr(module, child_name, PackedLinear(child))
        else:
            pack_linears(child)
