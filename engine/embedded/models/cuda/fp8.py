"""Products in eight bits: weights with a scale for each output channel, activations with one for each token
(docs/decisions/0011)."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from engine.embedded.models.cuda import fp8_kernels
from engine.embedded.models.cuda.weights import Norm, Normed, Products, Tile, Weight


class Fp8Products(Products):
    """Products of weights in eight bits: one row keeps its own type; more rows are quantised and multiplied on fp8
    tensor cores."""

    # Measured on an H200 (benchmarks/kernels.py).
    tiles: ClassVar[Mapping[str, Tile]] = {
        "qkv": (16, 512, 8),
        "out": (16, 1024, 8),
        "gate_up": (2, 4096, 4),
        "down": (8, 2048, 8),
    }

    def weight(self, name: str, values: torch.Tensor) -> Weight:
        if values.is_meta:  # only the shapes are wanted
            scales = values.new_empty(len(values), dtype=torch.float32)
            return Weight(name, values.new_empty(values.shape, dtype=torch.float8_e4m3fn), scales)
        quantised, scales = fp8_kernels.quantise(values)
        return Weight(name, quantised, scales.flatten())

    def load(self, weight: Weight, rows: int) -> None:
        values = weight.values.new_zeros((rows, weight.values.shape[1]))
        self._product_rows(Normed(values, scales=torch.ones((rows, 1), device=values.device)), weight)

    def _norm_rows(self, x: torch.Tensor, norm: Norm) -> Normed:
        return _quantised(*fp8_kernels.rms_norm(x, *norm))

    def _product_rows(self, normed: Normed, weight: Weight) -> torch.Tensor:
        assert normed.scales is not None and weight.scales is not None, "both are quantised"
        product: torch.Tensor = torch._scaled_mm(
            normed.values,
            weight.values.t(),
            scale_a=normed.scales,
            scale_b=weight.scales.unsqueeze(0),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return product

    def _add_rows(self, x: torch.Tensor, value: torch.Tensor, weight: Weight, norm: Norm | None) -> Normed:
        return self._added(x, _quantised(*fp8_kernels.quantise(value)), weight, norm)

    def _add_gated_rows(
        self, x: torch.Tensor, normed: Normed, gate_up: Weight, down: Weight, norm: Norm | None
    ) -> Normed:
        return self._added(x, _quantised(*fp8_kernels.silu_mul(self._product_rows(normed, gate_up))), down, norm)

    def _added(self, x: torch.Tensor, value: Normed, weight: Weight, norm: Norm | None) -> Normed:
        """Add a product to x in the same pass as the norm that follows, since `_scaled_mm` cannot add."""
        product = self._product_rows(value, weight)
        return Normed(x.add_(product)) if norm is None else _quantised(*fp8_kernels.rms_norm(x, *norm, added=product))


def _quantised(values: torch.Tensor, scales: torch.Tensor) -> Normed:
    return Normed(values, scales=scales)
