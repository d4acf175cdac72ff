"""Triton kernels for what lies between matrix products and attention, and for the products themselves when there are few rows.

A decode step streams every weight once, so its time is that of the memory; what these save are passes over activations and the gaps
between kernels. All are bound to the stream order of one CUDA graph. With programmatic dependent launch (`launch_pdl`) a kernel may
start while the one before it drains: it reads weights, which nothing writes, and waits (`gdc_wait`) before it touches what others wrote.
"""

# mypy: ignore-errors

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_PROGRAMS = 264
"""Two for each multiprocessor of an H200: as many as attention is divided into while there are fewer sequences."""
_MAX_SPLITS = 16


@triton.jit
def _add_rms_norm(x, residual, weight, out, size, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    gdc_wait()
    value = tl.load(x + row * size + columns, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * size + columns, inside, 0.0).to(tl.float32)
        tl.store(residual + row * size + columns, value.to(residual.dtype.element_ty), inside)
        value = value.to(residual.dtype.element_ty).to(tl.float32)
    gdc_launch_dependents()
    value *= tl.rsqrt(tl.sum(value * value) / size + epsilon)
    tl.store(out + row * size + columns, (value.to(out.dtype.element_ty).to(tl.float32) * scale).to(out.dtype.element_ty), inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm over the last dimension: [rows, size]."""
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _add_rms_norm[(len(x),)](x, x, weight, out, x.shape[1], epsilon, False, block, num_warps=8, launch_pdl=True)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`residual += x`, in place, and its RMSNorm."""
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _add_rms_norm[(len(x),)](x, residual, weight, out, x.shape[1], epsilon, True, block, num_warps=8, launch_pdl=True)
    return out


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gdc_wait()
    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, inside, 0.0).to(tl.float32)
    gdc_launch_dependents()
    tl.store(out + row * size + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up: [rows, 2 * size] with the gates first, to [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    _silu_mul[(rows, triton.cdiv(size, 2048))](gate_up, out, size, 2048, num_warps=8, launch_pdl=True)
    return out


@triton.jit
def _rotate_and_store(
    qkv, query, rotations, positions, slots, keys, values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    half = tl.arange(0, HALF)[None, :]
    is_query, is_key, exists = head < HEADS, head < HEADS + KV_HEADS, head < HEADS + 2 * KV_HEADS
    gdc_wait()
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64) * (KV_HEADS * DIM)
    cos = tl.load(rotations + position * DIM + half)
    sin = tl.load(rotations + position * DIM + HALF + half)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM + half
    low, high = tl.load(source, exists, 0.0), tl.load(source + HALF, exists, 0.0)
    gdc_launch_dependents()
    first, second = low.to(tl.float32), high.to(tl.float32)
    low = tl.where(is_key, (first * cos - second * sin).to(low.dtype), low)
    high = tl.where(is_key, (second * cos + first * sin).to(high.dtype), high)
    tl.store(source, low, is_key & (head >= HEADS))
    tl.store(source + HALF, high, is_key & (head >= HEADS))
    to_query = query + (row * HEADS + head) * DIM + half
    to_keys = keys + slot + (head - HEADS) * DIM + half
    to_values = values + slot + (head - HEADS - KV_HEADS) * DIM + half
    target = tl.where(is_query, to_query, tl.where(is_key, to_keys, to_values))
    tl.store(target, low, exists)
    tl.store(target + HALF, high, exists)


def rotate_and_store(
    qkv: torch.Tensor,
    heads: tuple[int, int, int],
    rotations: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotary embedding, and the step's keys and values into their cache rows; the rotated keys also stay in `qkv`.

    `qkv` [rows, (heads + 2 kv_heads) * dim]; `heads` is (heads, kv_heads, dim); `rotations` float32 [positions, dim] has the cosines of
    half a head, then the sines; `slots` [rows] counts cache rows of kv_heads * dim values from the first of `keys` and of `values`,
    whose strides are those of one row. Returns the queries, [rows, heads, dim].
    """
    count, kv_count, dim = heads
    query = qkv.new_empty((len(qkv), count, dim))
    group = 8
    _rotate_and_store[(len(qkv), triton.cdiv(count + 2 * kv_count, group))](
        qkv, query, rotations, positions, slots, keys, values, count, kv_count, dim, dim // 2, group, num_warps=4, launch_pdl=True
    )
    return query


@triton.jit
def _gemv(
    x, weight, norm, out, epsilon, N,
    K: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tiles = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    first = tl.load(tiles, eviction_policy="evict_first")
    if GATED:
        first_up = tl.load(tiles + N * K, eviction_policy="evict_first")
    gdc_launch_dependents()
    gdc_wait()
    scale = 1.0
    if NORM:
        whole = tl.arange(0, KP)
        values = tl.load(x + whole, whole < K, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values) / K + epsilon)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        value = tl.load(x + start + k).to(tl.float32)
        if NORM:
            value = (value * scale).to(x.dtype.element_ty).to(tl.float32) * tl.load(norm + start + k).to(tl.float32)
            value = value.to(x.dtype.element_ty).to(tl.float32)
        if start == 0:
            tile = first
        else:
            tile = tl.load(tiles + start, eviction_policy="evict_first")
        acc += tile.to(tl.float32) * value[None, :]
        if GATED:
            if start == 0:
                tile_up = first_up
            else:
                tile_up = tl.load(tiles + N * K + start, eviction_policy="evict_first")
            acc_up += tile_up.to(tl.float32) * value[None, :]
    total = tl.sum(acc, 1)
    if GATED:
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate * tl.sigmoid(gate) * tl.sum(acc_up, 1)
    if ADD:
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(out + n).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty))


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    tile: tuple[int, int, int] = (8, 1024, 4),
) -> torch.Tensor:
    """x · weightᵀ for one row: x [1, K], weight [N, K].

    With `norm` (weight, epsilon) x is normalised first; with `residual` [1, N] the product is added to it, in place; `gated` takes
    the first half of the weight's rows as gates and returns silu(gate) · up, [1, N / 2].
    """
    K = x.shape[1]
    N = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, block_k, warps = _fitting(tile, N, K)
    out = residual if residual is not None else x.new_empty((1, N))
    scale, epsilon = norm if norm is not None else (x, 0.0)
    _gemv[(N // block_n,)](
        x, weight, scale, out, epsilon, N, K, norm is not None, residual is not None, gated,
        block_n, block_k, triton.next_power_of_2(K), num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return out


def fits_gemv(weight: torch.Tensor) -> bool:
    """Whether `gemv` takes a weight of this shape."""
    return weight.shape[1] % 64 == 0 and weight.shape[0] % 16 == 0


def _fitting(tile: tuple[int, int, int], n: int, k: int) -> tuple[int, int, int]:
    """A tile of about as many values that divides [n, k]."""
    block_n, block_k, warps = tile
    while k % block_k:
        block_k //= 2
        block_n = min(2 * block_n, 16)
    while n % block_n:
        block_n //= 2
    return block_n, block_k, warps


@triton.jit
def _attend(
    query, keys, values, pages, positions, out, partial, counters, scale, width, block_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    member, d = tl.arange(0, PAD), tl.arange(0, DIM)
    inside = (member < GROUP)[:, None]
    heads = ((row * KV_HEADS + head) * GROUP + member)[:, None] * DIM + d[None, :]
    gdc_wait()
    length = tl.load(positions + row) + 1
    share = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE
    q = tl.load(query + heads, inside, 0.0)
    best = tl.full((PAD,), float("-inf"), tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    acc = tl.zeros((PAD, DIM), tl.float32)
    for start in tl.range(split * share, tl.minimum(length, (split + 1) * share), TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        exists = token < length
        page = tl.load(pages + row * width + token // BLOCK, exists, 0).to(tl.int64)
        cells = (page * block_stride + (token % BLOCK) * (KV_HEADS * DIM) + head * DIM)[:, None] + d[None, :]
        k = tl.load(keys + cells, exists[:, None], 0.0)
        score = tl.where(exists[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new = tl.maximum(best, tl.max(score, 1))
        shrink, weight = tl.exp2(best - new), tl.exp2(score - new[:, None])
        v = tl.load(values + cells, exists[:, None], 0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
        total = total * shrink + tl.sum(weight, 1)
        best = new
    gdc_launch_dependents()
    if SPLITS == 1:
        tl.store(out + heads, (acc / total[:, None]).to(out.dtype.element_ty), inside)
    else:
        pair = row * KV_HEADS + head
        mine = partial + (pair * SPLITS + split) * (PAD * (DIM + 2))
        tl.store(mine + member, best)
        tl.store(mine + PAD + member, total)
        tl.store(mine + 2 * PAD + member[:, None] * DIM + d[None, :], acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + pair, 1, sem="acq_rel") == SPLITS - 1:  # the last one puts all parts together
            tl.store(counters + pair, 0)
            best = tl.full((PAD,), float("-inf"), tl.float32)
            total = tl.zeros((PAD,), tl.float32)
            acc = tl.zeros((PAD, DIM), tl.float32)
            for other in range(SPLITS):
                its = partial + (pair * SPLITS + other) * (PAD * (DIM + 2))
                its_best = tl.load(its + member, cache_modifier=".cg")
                new = tl.maximum(best, its_best)
                shrink, weight = tl.exp2(best - new), tl.where(its_best == float("-inf"), 0.0, tl.exp2(its_best - new))
                total = total * shrink + tl.load(its + PAD + member, cache_modifier=".cg") * weight
                part = tl.load(its + 2 * PAD + member[:, None] * DIM + d[None, :], cache_modifier=".cg")
                acc = acc * shrink[:, None] + part * weight[:, None]
                best = new
            tl.store(out + heads, (acc / total[:, None]).to(out.dtype.element_ty), inside)


class DecodeAttention:
    """One new token of each sequence over its KV blocks, by online softmax; the heads that share keys are rows of one product.

    While there are few sequences each is divided among several programs, and the last of them to finish puts the parts together.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, scale: float, device: torch.device) -> None:
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        self._scale = scale / math.log(2)
        self._pad = max(16, triton.next_power_of_2(heads // kv_heads))
        programs = max(_PROGRAMS + kv_heads, _MAX_SPLITS * kv_heads)
        self._partial = torch.empty(programs * self._pad * (dim + 2), device=device)
        self._counters = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
    ) -> None:
        """`query` and `out` [rows, heads, dim]; a layer's `keys` and `values` [blocks, block_size, kv_heads, dim]; block tables `pages`
        int32 [rows, blocks]; `positions` int32 [rows] of the new tokens, whose keys and values are there already.
        """
        rows = len(query)
        splits = max(1, min(_MAX_SPLITS, _PROGRAMS // (rows * self._kv_heads)))
        tile, warps = (32, 2) if rows >= 128 else (64, 4)
        _attend[(rows, self._kv_heads, splits)](
            query, keys, values, pages, positions, out, self._partial, self._counters, self._scale, pages.shape[1], keys.stride(0),
            self._kv_heads, self._heads // self._kv_heads, self._pad, self._dim, keys.shape[1], tile, splits, 3,
            num_warps=warps, launch_pdl=True,
        )  # fmt: skip
