"""Triton kernels whose results are in eight bits, as products of fp8 take them, each row with a scale of its own.

The program that has a whole row in registers quantises it; its scale makes its largest value 448, the largest of
float8_e4m3fn. As in `kernels`, a kernel may start while the one before it drains.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LARGEST = 448.0
_LARGEST = tl.constexpr(LARGEST)
_TINY = tl.constexpr(1e-12)
"""Lower bound of a row's largest value, so that a row of zeros has a scale."""


@triton.jit
def _store_row(value, inside, row, columns, size, out, scales):
    scale = tl.maximum(tl.max(tl.abs(value)), _TINY) / _LARGEST
    value = tl.minimum(tl.maximum(value / scale, -_LARGEST), _LARGEST)
    tl.store(out + row * size + columns, value.to(out.dtype.element_ty), inside)
    tl.store(scales + row, scale)


@triton.jit
def _quantise(x, out, scales, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gdc_wait()
    value = tl.load(x + row * size + columns, inside, 0.0).to(tl.float32)
    gdc_launch_dependents()
    _store_row(value, inside, row, columns, size, out, scales)


@triton.jit
def _rms_norm(x, added, weight, out, scales, size, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    factor = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    gdc_wait()
    value = tl.load(x + row * size + columns, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(added + row * size + columns, inside, 0.0).to(tl.float32)
    gdc_launch_dependents()
    if ADD:
        stored = value.to(x.dtype.element_ty)
        tl.store(x + row * size + columns, stored, inside)
        value = stored.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / size + epsilon) * factor
    _store_row(value, inside, row, columns, size, out, scales)


@triton.jit
def _silu_mul(gate_up, out, scales, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gdc_wait()
    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, inside, 0.0).to(tl.float32)
    gdc_launch_dependents()
    _store_row(gate * tl.sigmoid(gate) * up, inside, row, columns, size, out, scales)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, size] as float8_e4m3fn, and the scale of each row: float32 [rows, 1]."""
    out, scales = _empty(len(x), x.shape[1], x.device)
    block, warps = _whole(x.shape[1])
    _quantise[(len(x),)](x, out, scales, x.shape[1], block, num_warps=warps, launch_pdl=True)
    return out, scales


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, added: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension, quantised as by `quantise`: [rows, size]. `added` is first added to x, in
    place."""
    out, scales = _empty(len(x), x.shape[1], x.device)
    block, warps = _whole(x.shape[1])
    term = x if added is None else added
    _rms_norm[(len(x),)](
        x, term, weight, out, scales, x.shape[1], epsilon, added is not None, block, num_warps=warps, launch_pdl=True
    )  # fmt: skip
    return out, scales


def silu_mul(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) · up, quantised as by `quantise`: [rows, 2 * size] with the gates first, to [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out, scales = _empty(rows, size, gate_up.device)
    block, warps = _whole(size)
    _silu_mul[(rows,)](gate_up, out, scales, size, block, num_warps=warps, launch_pdl=True)
    return out, scales


def _empty(rows: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=device), torch.empty((rows, 1), device=device)


def _whole(size: int) -> tuple[int, int]:
    """Return the size of a block that holds a row, and the number of warps that hold the block in their registers."""
    block = triton.next_power_of_2(size)
    return block, min(32, max(4, block // 512))
