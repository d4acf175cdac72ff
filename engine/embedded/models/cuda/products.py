"""Products of few rows on tensor cores: bound by reading the weight, like `kernels.gemv`.

cuBLAS is as fast at the product itself, but it neither starts while the kernel before drains nor includes what follows
it. The tensor memory accelerator loads tiles, so that threads compute no addresses and missing rows are zeros.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_ROWS = 64
_MAX_PROGRAMS = 1024


@triton.jit(do_not_specialize=["rows"])  # any number of rows is sampled from after prompts
def _product(
    x, weight, out, partial, counters, rows, N, K,
    ADD: tl.constexpr, GATED: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
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
    if GATED:
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * acc_up
    n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, M)
    exists = (m < rows)[None, :]
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
        self._partial = torch.empty(_MAX_PROGRAMS * 128 * MAX_ROWS, device=device)
        self._counters = torch.zeros(_MAX_PROGRAMS, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        tile: tuple[int, int, int, int, int],
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """x [rows, K], weight [N, K]; `residual` and `gated` are those of `kernels.gemv`. `tile`: rows and columns
        of the weight for each program, splits of K, stages, warps."""
        rows, k = x.shape
        n = weight.shape[0] // 2 if gated else weight.shape[0]
        block_n, block_k, splits, stages, warps = tile
        out = residual if residual is not None else x.new_empty((rows, n))
        padded = max(16, triton.next_power_of_2(rows))
        assert rows <= MAX_ROWS and (n // block_n) * splits <= _MAX_PROGRAMS, "the scratch memory is for fewer"
        _product[(n // block_n, splits)](
            TensorDescriptor.from_tensor(x, [padded, block_k]),
            TensorDescriptor.from_tensor(weight, [block_n, block_k]),
            out, self._partial, self._counters, rows, n, k, residual is not None, gated,
            padded, block_n, block_k, splits, stages, num_warps=warps, launch_pdl=True,
        )  # fmt: skip
        return out


def fits_product(weight: torch.Tensor) -> bool:
    """Return whether tiles of up to 64 rows and 256 columns, splits included, divide a weight of this shape."""
    return weight.shape[0] % 128 == 0 and weight.shape[1] % 256 == 0
