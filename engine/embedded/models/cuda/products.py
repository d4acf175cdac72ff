"""Products of few rows on tensor cores: bound by reading the weight, like `kernels.gemv`.

cuBLAS is as fast at the product itself, but it neither starts while the kernel before drains nor includes what follows
it. For large weights the tensor memory accelerator loads tiles, so that threads compute no addresses and missing rows
are zeros. Products of small weights are bound by latency: each program loads its whole share of the weight before it
waits for x.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.embedded.models.cuda.kernels import copied_to

MAX_ROWS = 128
FewTile = tuple[int, int, int, int, int]
"""Share of each program of `Product`: rows and columns of the weight, splits of the columns, stages, warps."""
LEAST_PROGRAMS = 96
"""Minimum number of programs of a product: fewer leave too many multiprocessors idle."""
_MAX_PROGRAMS = 1024
MAX_SMALL_ROWS = 16
"""Maximum number of rows of x in `small_product`."""
_SMALL = 1 << 22
"""Maximum number of values of a weight for which `small_product` beats the library."""
_SMALL_WIDTH = 2048
"""Maximum width of such a weight: a program holds rows of it, and all of x."""
_SMALL_BLOCK = 16
"""Rows of the weight in each of its programs."""
_PARTS = 4
"""Parts of the columns that warps multiply side by side."""


@triton.jit(do_not_specialize=["rows"])  # any number of rows is sampled from after prompts
def _product(
    x, weight, scales, channels, out, partial, counters, rows, N, K,
    FP8: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    gdc_launch_dependents()
    gdc_wait()
    share = K // SPLITS
    acc = tl.zeros((BLOCK_N, M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, M), tl.float32)
    for start in tl.range(split * share, (split + 1) * share, BLOCK_K, num_stages=STAGES):
        value = x.load([0, start]).T
        acc = tl.dot(weight.load([tile * BLOCK_N, start]), value, acc)
        if GATED:
            acc_up = tl.dot(weight.load([N + tile * BLOCK_N, start]), value, acc_up)
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, M)
    exists = (m < rows)[None, :]
    if FP8:
        scale = tl.load(scales + m, m < rows, 0.0)[None, :]
        acc *= scale * tl.load(channels + n)[:, None]
        if GATED:
            acc_up *= scale * tl.load(channels + N + n)[:, None]
    if GATED:
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * acc_up
    target = out + m[None, :] * N + n[:, None]
    if SPLITS == 1:
        if ADD:
            acc += tl.load(target, exists, 0.0).to(tl.float32)
        tl.store(target, acc.to(out.dtype.element_ty), exists)
    else:
        cells = tl.arange(0, BLOCK_N)[:, None] * M + m[None, :]
        tl.store(partial + (tile * SPLITS + split) * (BLOCK_N * M) + cells, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:  # the last one adds up the parts, in order
            tl.store(counters + tile, 0)
            acc = tl.zeros((BLOCK_N, M), tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(partial + (tile * SPLITS + other) * (BLOCK_N * M) + cells, cache_modifier=".cg")
            if ADD:
                acc += tl.load(target, exists, 0.0).to(tl.float32)
            tl.store(target, acc.to(out.dtype.element_ty), exists)


class Product:
    """x · weightᵀ for up to MAX_ROWS rows of x."""

    def __init__(self, device: torch.device) -> None:
        self._partial = torch.empty(_MAX_PROGRAMS * 64 * MAX_ROWS, device=device)
        self._counters = torch.zeros(_MAX_PROGRAMS, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        tile: FewTile,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x [rows, K], weight [N, K]; `residual` and `gated` are those of `kernels.gemv`. Gated products are not split.
        `scales` come with both in float8_e4m3fn, those of the rows of x and of the weight: float32 [rows] and [N]; then
        the product is bfloat16.
        """
        rows, k = x.shape
        n = weight.shape[0] // 2 if gated else weight.shape[0]
        block_n, block_k, splits, stages, warps = tile
        if residual is not None:
            out = residual
        else:
            out = torch.empty((rows, n), dtype=torch.bfloat16 if scales else x.dtype, device=x.device)
        padded = max(16, triton.next_power_of_2(rows))
        programs = n // block_n * splits
        assert rows <= MAX_ROWS and not (gated and splits > 1)
        assert splits == 1 or (programs * block_n * padded <= len(self._partial) and programs <= len(self._counters)), (
            "the scratch memory is for fewer"
        )
        _product[(n // block_n, splits)](
            TensorDescriptor.from_tensor(x, [padded, block_k]),
            TensorDescriptor.from_tensor(weight, [block_n, block_k]),
            *(scales or (x, x)), out, self._partial, self._counters, rows, n, k,
            scales is not None, residual is not None, gated,
            padded, block_n, block_k, splits, stages, num_warps=warps, launch_pdl=True,
        )  # fmt: skip
        return out


def fitted(tile: FewTile, weight: torch.Tensor, gated: bool) -> FewTile | None:
    """Return this tile if it divides the weight, else the same with half as many columns.

    None if neither does, or if the weight is too small for `Product`.
    """
    block_n, block_k, splits, stages, warps = tile
    tiles, rest = divmod(weight.shape[0], block_n * (1 + gated))
    if rest or tiles * splits < LEAST_PROGRAMS:
        return None
    return next(
        (
            (block_n, columns, splits, stages, warps)
            for columns in (block_k, block_k // 2)
            if weight.shape[1] % (columns * splits) == 0
        ),
        None,
    )


@triton.jit(do_not_specialize=["rows"])
def _small_product(
    x, weight, norm, out, copy, epsilon, rows, N, pitch,
    K: tl.constexpr, NORM: tl.constexpr, COPY: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    n, m, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, M), tl.arange(0, BLOCK_K)
    inside, exists = k < K, m < rows
    cells = weight + n[:, None] * K + k[None, :]
    tile = tl.load(cells, inside[None, :], 0.0, eviction_policy="evict_first")
    if GATED:
        tile_up = tl.load(cells + N * K, inside[None, :], 0.0, eviction_policy="evict_first")
    if NORM:
        weighed = tl.load(norm + k, inside, 0.0).to(tl.float32)
    gdc_launch_dependents()
    gdc_wait()
    value = tl.load(x + m[:, None] * K + k[None, :], exists[:, None] & inside[None, :], 0.0)
    if COPY:
        first = exists[:, None] & inside[None, :] & (tl.program_id(0) == 0)
        tl.store(copy + m[:, None] * pitch + k[None, :], value, first)
    if NORM:
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / K + epsilon)[:, None]
        value = ((wide * scale).to(value.dtype).to(tl.float32) * weighed[None, :]).to(value.dtype)
    value = tl.permute(tl.reshape(value, (M, PARTS, BLOCK_K // PARTS)), (1, 2, 0))
    total = _sum_of_parts(tile, value, BLOCK_N, BLOCK_K, PARTS)
    if GATED:
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate * tl.sigmoid(gate) * _sum_of_parts(tile_up, value, BLOCK_N, BLOCK_K, PARTS)
    target = out + m[None, :] * N + n[:, None]
    if ADD:
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(target, exists[None, :], 0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), exists[None, :])


@triton.jit
def _sum_of_parts(tile, value, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """Return tile [BLOCK_N, BLOCK_K] · value, which is in parts: [PARTS, BLOCK_K / PARTS, M]."""
    parts = tl.permute(tl.reshape(tile, (BLOCK_N, PARTS, BLOCK_K // PARTS)), (1, 0, 2))
    return tl.sum(tl.dot(parts, value), 0)


def small_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    copy: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """x · weightᵀ for a weight that `is_small`: x [rows, K], weight [N, K]; the rest is that of `kernels.gemv`, but
    that rows of `copy` need not follow one another."""
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = residual if residual is not None else x.new_empty((rows, n))
    scale, epsilon = norm if norm is not None else (x, 0.0)
    target, pitch = copied_to(copy, x)
    _small_product[(n // _SMALL_BLOCK,)](
        x, weight, scale, out, target, epsilon, rows, n, pitch,
        k, norm is not None, copy is not None, residual is not None, gated, MAX_SMALL_ROWS, _SMALL_BLOCK,
        triton.next_power_of_2(k), _PARTS, num_warps=4 if norm is None else 8, launch_pdl=True,
    )  # fmt: skip
    return out


def is_small(rows: int, weight: torch.Tensor) -> bool:
    """Return whether `small_product` computes the product of so many rows with this weight."""
    n, k = weight.shape
    fits = n % (2 * _SMALL_BLOCK) == 0 and 16 * _PARTS <= k <= _SMALL_WIDTH  # half of a gated weight, too
    return rows <= MAX_SMALL_ROWS and n * k <= _SMALL and fits
