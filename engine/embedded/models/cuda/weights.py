"""Products of a layer with the operations around them: in the model's type here, in eight bits in `fp8`.

Both kinds have the same three: a product of the normalised x, one that is added to x, and the whole gated part. What a
norm returns is for the next product alone: `kernels.gemv` and `small_product` normalise their rows themselves, and
eight bits come with scales.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch.nn import functional

from engine.embedded.models.cuda import compressed, kernels
from engine.embedded.models.cuda.compressed import CompressedTile, CompressedWeight
from engine.embedded.models.cuda.products import FewTile, Product, fitted, is_small, small_product

Norm = tuple[torch.Tensor, float]
"""Weight and epsilon of an RMSNorm."""
Tile = tuple[int, int, int]
"""Share of each program of `kernels.gemv`: rows of the weight, columns, warps."""

_FEW_ROWS = 64
"""Maximum number of rows for which our own products beat cuBLAS's."""
_FEW_TILES: Mapping[str, FewTile] = {
    "out": (64, 128, 2, 4, 4),
    "gate_up": (64, 128, 1, 4, 4),
    "down": (64, 128, 2, 6, 4),
}
# Measured on an H200 (docs/log.md).
_COMPRESSED_TILES: Mapping[str, CompressedTile] = {
    "qkv": (4, 2, 512),
    "out": (4, 2, 512),
    "gate_up": (2, 2, 512),
    "down": (4, 2, 512),
}


class Weight(NamedTuple):
    """One or several linears, joined: `values` [N, K], of float8_e4m3fn with `scales`, float32 [N]."""

    name: str
    values: torch.Tensor
    scales: torch.Tensor | None = None
    compressed: CompressedWeight | None = None
    """A copy that products of one row read."""


class Normed(NamedTuple):
    """x for the next product: normalised, unless the product does that by `norm`; quantised if there are `scales`,
    float32 [rows, 1]."""

    values: torch.Tensor
    norm: Norm | None = None
    scales: torch.Tensor | None = None


class Copied(NamedTuple):
    """x before its norm, [rows, K], and where it is written, too: rows there need not follow one another."""

    x: torch.Tensor
    to: torch.Tensor


class Products(ABC):
    """Products of one row, which are bound by reading the weight, and the seam for all others."""

    tiles: ClassVar[Mapping[str, Tile]]
    """Tiles of products of one row by the names of their weights; `fetched` is the out product's if its weight is."""

    def __init__(self, fetch: bool) -> None:
        self._fetch = fetch
        """Whether the out product of one row has its weight fetched while attention runs."""

    def _is_streamed(self, x: torch.Tensor) -> bool:
        """Return whether `kernels.gemv`, or `compressed.product`, computes the products of x."""
        return len(x) == 1

    def _streamed(self, weight: Weight, fetch: bool = False) -> Callable[..., torch.Tensor]:
        """Return the product of one row with this weight: it takes x, and what is around the product."""
        if weight.compressed is not None:
            tile = _COMPRESSED_TILES[weight.name]
            return partial(compressed.product, weight=weight.compressed, fetch=fetch, tile=tile)
        values = weight.values if weight.scales is None else (weight.values, weight.scales)
        return partial(kernels.gemv, weight=values, fetch=fetch, tile=self.tiles["fetched" if fetch else weight.name])

    @abstractmethod
    def weight(self, name: str, values: torch.Tensor) -> Weight:
        """Return a weight for these products, of values [N, K] in the model's type."""

    def norm(self, x: torch.Tensor, norm: Norm) -> Normed:
        """Return x [rows, K] normalised for a product; valid until x changes."""
        return Normed(x, norm) if self._is_streamed(x) else self._norm_rows(x, norm)

    def product(self, normed: Normed, weight: Weight, copied: Copied | None = None) -> torch.Tensor:
        """Return x · weightᵀ of the normalised x: [rows, N]. `copied`: x, and where to write it beside that."""
        if not self._is_streamed(normed.values):
            return self._product_rows(normed, weight, copied)
        copy = None if copied is None else copied.to
        return self._streamed(weight)(normed.values, norm=normed.norm, copy=copy)

    def add(self, x: torch.Tensor, value: torch.Tensor, weight: Weight, norm: Norm | None) -> Normed:
        """Add value · weightᵀ to x in place, and return `norm` of x; without a norm, x itself."""
        if not self._is_streamed(x):
            return self._add_rows(x, value, weight, norm)
        self._streamed(weight, fetch=weight.name == "out" and self._fetch)(value, residual=x)
        return Normed(x, norm)

    def add_gated(self, x: torch.Tensor, normed: Normed, gate_up: Weight, down: Weight, norm: Norm | None) -> Normed:
        """Add the product of silu(gate) · up of the normalised x; the first half of the weight's rows are the gates."""
        if not self._is_streamed(x):
            return self._add_gated_rows(x, normed, gate_up, down, norm)
        value = self._streamed(gate_up)(normed.values, norm=normed.norm, gated=True)
        return self.add(x, value, down, norm)

    @abstractmethod
    def load(self, weight: Weight, rows: int) -> None:
        """Have the library of products load its kernel for this many rows."""

    @abstractmethod
    def _norm_rows(self, x: torch.Tensor, norm: Norm) -> Normed: ...

    @abstractmethod
    def _product_rows(self, normed: Normed, weight: Weight, copied: Copied | None = None) -> torch.Tensor: ...

    @abstractmethod
    def _add_rows(self, x: torch.Tensor, value: torch.Tensor, weight: Weight, norm: Norm | None) -> Normed: ...

    @abstractmethod
    def _add_gated_rows(
        self, x: torch.Tensor, normed: Normed, gate_up: Weight, down: Weight, norm: Norm | None
    ) -> Normed: ...


class PlainProducts(Products):
    """Weights of the model's type: cuBLAS, and our own products where those of few rows are faster."""

    # Measured on an H200 for eight models (benchmarks/results/2026-11-28-h200-one-row.md).
    tiles: ClassVar[Mapping[str, Tile]] = {
        "qkv": (2, 4096, 4),
        "out": (8, 1024, 4),
        "fetched": (16, 512, 4),
        "gate_up": (2, 4096, 4),
        "down": (8, 1024, 4),
    }

    def __init__(self, fetch: bool, device: torch.device) -> None:
        super().__init__(fetch)
        self._few = Product(device)

    def weight(self, name: str, values: torch.Tensor) -> Weight:
        return Weight(name, values)

    def load(self, weight: Weight, rows: int) -> None:
        if _few_tile(rows, weight) is None and not is_small(rows, weight.values):
            functional.linear(weight.values.new_zeros((rows, weight.values.shape[1])), weight.values)

    def _norm_rows(self, x: torch.Tensor, norm: Norm) -> Normed:
        return Normed(x, norm)

    def _product_rows(self, normed: Normed, weight: Weight, copied: Copied | None = None) -> torch.Tensor:
        copy = None if copied is None else copied.to
        if is_small(len(normed.values), weight.values):
            return small_product(normed.values, weight.values, norm=normed.norm, copy=copy)
        return functional.linear(_normalised(normed, copy), weight.values)

    def _add_rows(self, x: torch.Tensor, value: torch.Tensor, weight: Weight, norm: Norm | None) -> Normed:
        if (tile := _few_tile(len(x), weight)) is not None:
            self._few(value, weight.values, tile, residual=x)
        elif is_small(len(x), weight.values):
            small_product(value, weight.values, residual=x)
        else:
            torch.addmm(x, value, weight.values.t(), out=x)
        return Normed(x, norm)

    def _add_gated_rows(
        self, x: torch.Tensor, normed: Normed, gate_up: Weight, down: Weight, norm: Norm | None
    ) -> Normed:
        if (tile := _few_tile(len(x), gate_up)) is not None:
            value = self._few(_normalised(normed), gate_up.values, tile, gated=True)
        elif is_small(len(x), gate_up.values):
            value = small_product(normed.values, gate_up.values, norm=normed.norm, gated=True)
        else:
            value = kernels.silu_mul(self._product_rows(normed, gate_up))
        return self._add_rows(x, value, down, norm)


def _normalised(normed: Normed, copy: torch.Tensor | None = None) -> torch.Tensor:
    if normed.norm is None:
        assert copy is None, "x was normalised before"
        return normed.values
    return kernels.rms_norm(normed.values, *normed.norm, copy)


def fitted_by_name(tiles: Mapping[str, FewTile], name: str, values: torch.Tensor) -> FewTile | None:
    """Return the tile with which our own kernel computes the product of this name, if it does."""
    return fitted(tiles[name], values, name == "gate_up") if name in tiles else None


def _few_tile(rows: int, weight: Weight) -> FewTile | None:
    return fitted_by_name(_FEW_TILES, weight.name, weight.values) if rows <= _FEW_ROWS else None
