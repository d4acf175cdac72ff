"""Products in eight bits: weights with a scale for each output channel, activations with one for each token
(docs/decisions/0011)."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from engine.embedded.models.cuda import fp8_kernels
from engine.embedded.models.cuda.products import FewTile, Product
from engine.embedded.models.cuda.weights import Copied, Norm, Normed, Products, Tile, Weight, fitted_by_name

# Measured on an H200 (docs/log.md).
_TILES: dict[str, FewTile] = {
    "qkv": (64, 256, 1, 4, 4),
    "out": (64, 256, 2, 4, 4),
    "gate_up": (64, 256, 1, 2, 4),
    "down": (64, 256, 2, 4, 4),
}
_FEW_TILES: Mapping[int, Mapping[str, FewTile]] = {64: _TILES, 128: _TILES | {"gate_up": (64, 128, 1, 3, 4)}}
"""Tiles for up to so many rows."""


class Fp8Products(Products):
    """Products of weights in eight bits: rows are quantised and multiplied on fp8 tensor cores, few by our own kernel.
    One row keeps its own type if that kernel does not take all weights."""

    # Measured on an H200 (benchmarks/kernels.py).
    tiles: ClassVar[Mapping[str, Tile]] = {
        "qkv": (16, 512, 8),
        "out": (16, 1024, 8),
        "fetched": (16, 1024, 8),
        "gate_up": (2, 4096, 4),
        "down": (8, 2048, 8),
    }

    def __init__(self, fetch: bool, device: torch.device) -> None:
        super().__init__(fetch)
        self._few = Product(device)
        self._fits = True
        """Whether it takes all weights."""

    def _is_streamed(self, x: torch.Tensor) -> bool:
        return len(x) == 1 and not self._fits

    def weight(self, name: str, values: torch.Tensor) -> Weight:
        self._fits &= fitted_by_name(_TILES, name, values) is not None
        if values.is_meta:  # only the shapes are wanted
            scales = values.new_empty(len(values), dtype=torch.float32)
            return Weight(name, values.new_empty(values.shape, dtype=torch.float8_e4m3fn), scales)
        quantised, scales = fp8_kernels.quantise(values)
        return Weight(name, quantised, scales.flatten())

    def load(self, weight: Weight, rows: int) -> None:
        if _few_tile(rows, weight) is not None:
            return
        values = weight.values.new_zeros((rows, weight.values.shape[1]))
        self._product_rows(Normed(values, scales=torch.ones((rows, 1), device=values.device)), weight)

    def _norm_rows(self, x: torch.Tensor, norm: Norm) -> Normed:
        return _quantised(*fp8_kernels.rms_norm(x, *norm))

    def _product_rows(self, normed: Normed, weight: Weight, copied: Copied | None = None) -> torch.Tensor:
        if copied is not None:
            copied.to.copy_(copied.x)
        assert normed.scales is not None and weight.scales is not None, "both are quantised"
        if (tile := _few_tile(len(normed.values), weight)) is not None:
            return self._few_rows(normed, weight, tile)
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
        if (tile := _few_tile(len(x), gate_up)) is not None:
            value = _quantised(*fp8_kernels.quantise(self._few_rows(normed, gate_up, tile, gated=True)))
        else:
            value = _quantised(*fp8_kernels.silu_mul(self._product_rows(normed, gate_up)))
        return self._added(x, value, down, norm)

    def _added(self, x: torch.Tensor, value: Normed, weight: Weight, norm: Norm | None) -> Normed:
        """Add a product to x: by our own kernel, else in the same pass as the norm that follows."""
        if (tile := _few_tile(len(x), weight)) is not None:
            self._few_rows(value, weight, tile, residual=x)
            return Normed(x) if norm is None else _quantised(*fp8_kernels.rms_norm(x, *norm))
        product = self._product_rows(value, weight)
        return Normed(x.add_(product)) if norm is None else _quantised(*fp8_kernels.rms_norm(x, *norm, added=product))

    def _few_rows(
        self, value: Normed, weight: Weight, tile: FewTile, residual: torch.Tensor | None = None, gated: bool = False
    ) -> torch.Tensor:
        assert value.scales is not None and weight.scales is not None, "both are quantised"
        return self._few(value.values, weight.values, tile, residual, gated, (value.scales.flatten(), weight.scales))


def _few_tile(rows: int, weight: Weight) -> FewTile | None:
    """Return the tile with which our own kernel computes a product, if it does."""
    tiles = next((tiles for most, tiles in _FEW_TILES.items() if rows <= most), {})
    return fitted_by_name(tiles, weight.name, weight.values)


def _quantised(values: torch.Tensor, scales: torch.Tensor) -> Normed:
    return Normed(values, scales=scales)
