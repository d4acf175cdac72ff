"""Products of one row with bfloat16 weights that are stored without loss in 12 bits.

A product of one row is bound by reading its weight. Of the eight bits of exponent that bfloat16 has, a row of a trained
weight needs four: all but one in ten thousand of its values lie within 15 powers of two, or are multiples of the
smallest step there. So a row is stored as signs, mantissas and four bits of exponent above a base, which is read in
three quarters of the time. Values that do not fit are listed beside it as they are.

A code is seeeemmmmmmm: with zeros between sign and exponent it is a bfloat16 number, the value divided by 2^base. Eight
codes lie in three words of 32 bits: the low bytes (emmmmmmm) of four each in the first two, and all s and eee in the
third. There bits 7, 2, 1 and 0 of each byte belong to one of the first four codes, and to one of the last four once the
word is rotated by four bits. The i-th words of a row hold columns i, i + K/8, i + 2·K/8 and so on.
"""

# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.embedded.models.cuda.kernels import columns_from, copied_to, fetch_lines, scale_of, weighed

ENTRIES = 16
"""Maximum number of values of a row that can be listed."""
_LEAST_WIDTH = 2048
"""Minimum width of a weight: products of small ones are bound by latency."""
_LEAST_TOP = 15
_MOST_TOP = 240
"""Bounds of the largest exponent of a row, as it is stored in bfloat16; larger values are listed."""
_WINDOWS = 8
"""Windows of 16 exponents that are tried, down from the largest."""
_BLOCK = 512
"""Columns that are compressed at a time."""
_RAISE = tl.constexpr(100)
"""Codes taken as bfloat16 are near float32's smallest number: x is multiplied by 2 to this, and sums divided by it."""
_LEAST_WARPS = 2000
"""Minimum number of warps of a product: an H200 has 132 multiprocessors, which run 16 and more at a time."""
_WARP_WORDS = 128
"""Words of a row that a warp reads at a time: four for each thread."""
CompressedTile = tuple[int, int, int]
"""Share of each program: rows at a time, how many times, and words of a row at a time."""


class CompressedWeight(NamedTuple):
    """A weight of [N, K] values."""

    words: torch.Tensor
    """int32 [N, 3, K / 8]."""
    scales: torch.Tensor
    """2^base of each row, divided by 2^100 since x is multiplied by that: float32 [N]."""
    listed: torch.Tensor
    """Column and bits of the values that have no code, which is 0 then: int32 [ENTRIES, N], 0 for none."""


@triton.jit
def _code(bits, top):
    """Return the code of a value with these bits in a row whose largest exponent is `top`; 0 and 1 if it has none."""
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    stored = exponent - (top - 15)
    shift = tl.minimum(tl.maximum(1 - stored, 0), 8)
    whole = tl.where(exponent > 0, mantissa | 0x80, mantissa)
    small = whole >> shift
    lost = ((small << shift) != whole) | (stored > 15) | ((exponent == 0) & (mantissa != 0))
    code = ((bits >> 4) & 0x800) | tl.where(stored > 0, (stored << 7) | mantissa, small)
    return tl.where(lost, 0, code), lost.to(tl.int32)


@triton.jit
def _compress(
    values, words, scales, listed, most, N, W,
    BLOCK: tl.constexpr, WINDOWS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source, target = values + row * W * 8 + i, words + row * W * 3 + i
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, 8 * W, BLOCK):
        bits = tl.load(source + start, i < 8 * W - start, 0).to(tl.int32)
        largest = tl.maximum(largest, (bits >> 7) & 0xFF)
    highest = tl.max(largest, 0)
    top, least = LEAST, 8 * W + 1
    for window in range(WINDOWS):
        tried = tl.minimum(tl.maximum(highest - window, LEAST), MOST)
        lost = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, 8 * W, BLOCK):
            lost += _code(tl.load(source + start, i < 8 * W - start, 0).to(tl.int32), tried)[1]
        count = tl.sum(lost, 0)
        top, least = tl.where(count < least, tried, top), tl.minimum(count, least)
    found = 0
    for start in range(0, W, BLOCK):
        inside = i < W - start
        low = tl.zeros((2, BLOCK), tl.uint32)
        others = tl.zeros((2, BLOCK), tl.uint32)
        half = tl.arange(0, 2)[:, None]
        for part in range(4):
            column = (half * 4 + part) * W + start + i[None, :]
            bits = tl.load(values + row * W * 8 + column, inside[None, :], 0).to(tl.int32)
            code, lost = _code(bits, top)
            flat = tl.reshape(lost, (2 * BLOCK,))
            place = tl.reshape(found + tl.cumsum(flat, 0) - 1, (2, BLOCK))
            tl.store(listed + place * N + row, (column << 16) | (bits & 0xFFFF), (lost > 0) & (place < LISTED))
            found += tl.sum(flat, 0)
            code = code.to(tl.uint32)
            low |= (code & 0xFF) << (8 * part)
            others |= (((code >> 4) & 0x80) | ((code >> 8) & 0x07)) << (8 * part)
        tl.store(target[None, :] + half * W + start, low.to(tl.int32, bitcast=True), inside[None, :])
        # The second half of these words is rotated, so that both fit into one.
        others = tl.where(half == 0, others, (others >> 4) | (others << 28))
        third = tl.sum(others, 0).to(tl.int32, bitcast=True)
        tl.store(target + 2 * W + start, third, inside)
    tl.store(scales + row, ((top - 15 - _RAISE + 127) << 23).to(tl.float32, bitcast=True))
    tl.atomic_max(most, found)


def compress(values: torch.Tensor, into: CompressedWeight | None = None) -> CompressedWeight | None:
    """Return a compressed copy of a bfloat16 weight [N, K], in new memory or in that of an earlier copy; None if it is
    small, or has rows of other distributions."""
    n, k = values.shape
    if values.dtype != torch.bfloat16 or not bytes_compressed(values.shape):
        return None
    device, width = values.device, k // 8
    compressed = into or CompressedWeight(
        torch.empty((n, 3, width), dtype=torch.int32, device=device),
        torch.empty(n, device=device),
        torch.empty((ENTRIES, n), dtype=torch.int32, device=device),
    )
    compressed.listed.zero_()
    most = torch.zeros(1, dtype=torch.int32, device=device)
    _compress[(n,)](
        values.view(torch.int16), *compressed, most, n, width,
        _BLOCK, _WINDOWS, _LEAST_TOP, _MOST_TOP, ENTRIES, num_warps=4,
    )  # fmt: skip
    return compressed if int(most) <= ENTRIES else None


def bytes_compressed(shape: tuple[int, ...]) -> int:
    """Return the size of a compressed weight of this shape; 0 if such weights are not compressed."""
    n, k = shape
    return n * (k * 3 // 2 + 4 * ENTRIES + 4) if _LEAST_WIDTH <= k < 1 << 16 and k % 32 == 0 else 0


@triton.jit
def _joined(low, high, LAST: tl.constexpr):
    """Return words with two bytes of `low` and of `high` in turns, the first ones or the last ones."""
    if LAST:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _words(cells, i, START: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    low = columns_from(cells, i, START, W, BLOCK, "evict_first").to(tl.uint32, bitcast=True)
    high = columns_from(cells + W, i, START, W, BLOCK, "evict_first").to(tl.uint32, bitcast=True)
    rest = columns_from(cells + 2 * W, i, START, W, BLOCK, "evict_first").to(tl.uint32, bitcast=True)
    return low, high, rest


@triton.jit
def _inputs(x, norm, scale, i, START: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Return x for the codes of words from START on: eight blocks, one for each code of a word."""
    found = ()
    for part in tl.static_range(8):
        value = columns_from(x + part * W + i, i, START, W, BLOCK, "").to(tl.float32)
        if NORM:
            weight = columns_from(norm + part * W + i, i, START, W, BLOCK, "")
            value = weighed(value, weight, scale, x.dtype.element_ty)
        found = found + (value * 2.0**_RAISE,)  # noqa: RUF005 - Triton knows no other way
    return found


@triton.jit
def _add_pair(total, pair, first, second):
    total += (pair << 16).to(tl.float32, bitcast=True) * first[None, :]
    total += (pair & 0xFFFF0000).to(tl.float32, bitcast=True) * second[None, :]
    return total


@triton.jit
def _add(total, words, inputs):
    """Add the products of eight codes for each word."""
    low, high, rest = words
    first, second = rest & 0x87878787, ((rest << 4) | (rest >> 28)) & 0x87878787
    total = _add_pair(total, _joined(low, first, False), inputs[0], inputs[1])
    total = _add_pair(total, _joined(low, first, True), inputs[2], inputs[3])
    total = _add_pair(total, _joined(high, second, False), inputs[4], inputs[5])
    return _add_pair(total, _joined(high, second, True), inputs[6], inputs[7])


@triton.jit
def _sum(
    total, x, norm, scale, scales, listed, first, matrix,
    NORM: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the products of some rows: the sums over their codes, and the values that are listed."""
    entry = tl.arange(0, LISTED * ROWS)  # in one dimension, so that each thread has one
    entry = tl.load(listed + (entry // ROWS) * matrix + first + entry % ROWS).to(tl.uint32, bitcast=True)
    column = (entry >> 16).to(tl.int32)
    value = tl.load(x + column).to(tl.float32)
    if NORM:
        value = weighed(value, tl.load(norm + column), scale, x.dtype.element_ty)
    value *= (entry << 16).to(tl.float32, bitcast=True)
    others = tl.sum(tl.reshape(value, (LISTED, ROWS)), 0)
    return tl.sum(total, 1) * tl.load(scales + first + tl.arange(0, ROWS)) + others


@triton.jit
def _product(
    x, words, scales, listed, norm, out, copy, epsilon, N, matrix,
    K: tl.constexpr, NORM: tl.constexpr, COPY: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    FETCH: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, KP: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = K // 8
    PASSES: tl.constexpr = (W + BLOCK - 1) // BLOCK
    first = tl.program_id(0) * (ROWS * TURNS)
    i = tl.arange(0, BLOCK)
    column = i[None, :]
    cells = words + (first + tl.arange(0, ROWS)).to(tl.int64)[:, None] * (3 * W) + column
    following = _words(cells, column, 0, W, BLOCK)
    if GATED:
        following_up = _words(cells + N * (3 * W), column, 0, W, BLOCK)
    if FETCH:
        lines = tl.minimum(tl.arange(0, KP // 64) * 32, 3 * W - 1)
        fetch_lines(words + (first + tl.arange(0, ROWS * TURNS)).to(tl.int64)[:, None] * (3 * W) + lines[None, :])
    gdc_launch_dependents()
    gdc_wait()
    scale = 1.0
    if NORM:
        scale = scale_of(x, copy, epsilon, K, KP, COPY)
    if PASSES == 1:
        inputs = _inputs(x, norm, scale, i, 0, W, BLOCK, NORM)
    for step in tl.static_range(TURNS * PASSES):
        tile = following
        if GATED:
            tile_up = following_up
        if (step + 1) % PASSES == 0:
            cells += ROWS * 3 * W
        if step + 1 < TURNS * PASSES:  # before this one is computed
            following = _words(cells, column, (step + 1) % PASSES * BLOCK, W, BLOCK)
            if GATED:
                following_up = _words(cells + N * (3 * W), column, (step + 1) % PASSES * BLOCK, W, BLOCK)
        if PASSES > 1:
            inputs = _inputs(x, norm, scale, i, step % PASSES * BLOCK, W, BLOCK, NORM)
        if step % PASSES == 0:
            acc = tl.zeros((ROWS, BLOCK), tl.float32)
            acc_up = tl.zeros((ROWS, BLOCK), tl.float32)
        acc = _add(acc, tile, inputs)
        if GATED:
            acc_up = _add(acc_up, tile_up, inputs)
        if (step + 1) % PASSES == 0:
            total = _sum(acc, x, norm, scale, scales, listed, first, matrix, NORM, LISTED, ROWS)
            if GATED:
                gate = total.to(out.dtype.element_ty).to(tl.float32)
                total = _sum(acc_up, x, norm, scale, scales, listed, N + first, matrix, NORM, LISTED, ROWS)
                total *= gate * tl.sigmoid(gate)
            target = out + first + tl.arange(0, ROWS)
            if ADD:
                total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(target).to(tl.float32)
            tl.store(target, total.to(out.dtype.element_ty))
            first += ROWS


def product(
    x: torch.Tensor,
    weight: CompressedWeight,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    copy: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    fetch: bool = False,
    tile: CompressedTile,
) -> torch.Tensor:
    """x · weightᵀ for one row, like `kernels.gemv`, for x below 2^27."""
    k, matrix = x.shape[1], len(weight.words)
    n = matrix // 2 if gated else matrix
    rows, turns, block = tile_for(tile, n, k // 8)
    fetch = fetch and k >= 128  # whole lines of memory
    assert copy is None or norm is not None, "only a norm reads all of x at once"
    out = residual if residual is not None else x.new_empty((1, n))
    scale, epsilon = norm if norm is not None else (x, 0.0)
    _product[(n // (rows * turns),)](
        x, *weight, scale, out, copied_to(copy, x)[0], epsilon, n, matrix,
        k, norm is not None, copy is not None, residual is not None, gated, fetch,
        rows, turns, block, triton.next_power_of_2(k), ENTRIES, num_warps=block // _WARP_WORDS, launch_pdl=True,
    )  # fmt: skip
    return out


def tile_for(tile: CompressedTile, n: int, width: int) -> CompressedTile:
    """Return the tile that suits a weight of n rows of so many words: at most an eighth of what is read is beyond the
    last word, where that can be, and enough warps are left to keep all multiprocessors busy."""
    rows, turns, block = tile
    while block > _WARP_WORDS and 7 * triton.cdiv(width, block) * block > 8 * width:
        block //= 2
    while rows * turns > 1 and (n % (rows * turns) or n // (rows * turns) * (block // _WARP_WORDS) < _LEAST_WARPS):
        rows, turns = (rows, turns // 2) if turns > 1 else (rows // 2, turns)
    return rows, turns, block
