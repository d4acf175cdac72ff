"""Triton kernels for the operations between matrix products and attention, and for products of few rows.

A decode step reads every weight once, so it is bound by memory; these kernels save passes over activations and the gaps
between kernels. All run in the stream order of one CUDA graph. With programmatic dependent launch (`launch_pdl`) a
kernel may start while the one before it drains: it reads weights, which nothing writes, and waits (`gdc_wait`) before
it touches what others wrote.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_AT_ONCE = 2048
"""Maximum width of a weight whose rows a program of `gemv` reads in one pass."""
_LEAST_PROGRAMS = 200
"""Minimum number of programs of a product of one row: an H200 has 132 multiprocessors, which run several at a time."""


@triton.jit
def _rms_norm(x, weight, out, copy, size, pitch, epsilon, COPY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    gdc_wait()
    value = tl.load(x + row * size + columns, inside, 0.0).to(tl.float32)
    gdc_launch_dependents()
    if COPY:
        tl.store(copy + row * pitch + columns, value.to(copy.dtype.element_ty), inside)
    value *= tl.rsqrt(tl.sum(value * value) / size + epsilon)
    tl.store(
        out + row * size + columns,
        (value.to(out.dtype.element_ty).to(tl.float32) * scale).to(out.dtype.element_ty),
        inside,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, copy: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm over the last dimension: [rows, size]. x is also written to `copy`, of its shape, whose rows need not
    follow one another."""
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    target, pitch = copied_to(copy, x)
    _rms_norm[(len(x),)](
        x, weight, out, target, x.shape[1], pitch, epsilon, copy is not None, block, num_warps=8, launch_pdl=True
    )
    return out


def copied_to(copy: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return what kernels take of a copy of x [rows, size], if there is to be one: where it is, and the distance of its
    rows."""
    return (x, x.shape[1]) if copy is None else (copy, copy.stride(0))


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
def _clamped(value):
    """Clamp to what float8_e4m3fn holds: its largest value is 448."""
    return tl.minimum(tl.maximum(value.to(tl.float32), -448.0), 448.0)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # they follow any number of tokens in a step's inputs
def _rotate_and_store(
    qkv, query, rotations, positions, slots, keys, values, bias, norms, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    FP8: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    half = tl.arange(0, HALF)[None, :]
    is_query, is_key, exists = head < HEADS, head < HEADS + KV_HEADS, head < HEADS + 2 * KV_HEADS
    if BIAS:
        shift = bias + head * DIM + half
        low_bias = tl.load(shift, exists, 0.0).to(tl.float32)
        high_bias = tl.load(shift + HALF, exists, 0.0).to(tl.float32)
    if NORM:
        weights = norms + tl.where(is_query, 0, DIM) + half
        low_weight, high_weight = tl.load(weights).to(tl.float32), tl.load(weights + HALF).to(tl.float32)
    gdc_wait()
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64) * (KV_HEADS * DIM)
    cos = tl.load(rotations + position * DIM + half)
    sin = tl.load(rotations + position * DIM + HALF + half)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM + half
    low, high = tl.load(source, exists, 0.0), tl.load(source + HALF, exists, 0.0)
    gdc_launch_dependents()
    if BIAS:
        low = (low.to(tl.float32) + low_bias).to(low.dtype)
        high = (high.to(tl.float32) + high_bias).to(high.dtype)
    first, second = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt(squares / DIM + epsilon)
        first = ((first * scale).to(low.dtype).to(tl.float32) * low_weight).to(low.dtype).to(tl.float32)
        second = ((second * scale).to(high.dtype).to(tl.float32) * high_weight).to(high.dtype).to(tl.float32)
    low = tl.where(is_key, (first * cos - second * sin).to(low.dtype), low)
    high = tl.where(is_key, (second * cos + first * sin).to(high.dtype), high)
    changed = exists if BIAS else is_key
    tl.store(source, low, changed & (head >= HEADS))
    tl.store(source + HALF, high, changed & (head >= HEADS))
    to_query = query + (row * HEADS + head) * DIM + half
    to_keys = keys + slot + (head - HEADS) * DIM + half
    to_values = values + slot + (head - HEADS - KV_HEADS) * DIM + half
    if FP8:
        target = tl.where(is_key, to_keys, to_values)
        cached = exists & (head >= HEADS)
        tl.store(target, _clamped(low).to(keys.dtype.element_ty), cached)
        tl.store(target + HALF, _clamped(high).to(keys.dtype.element_ty), cached)
        tl.store(to_query, low, is_query)
        tl.store(to_query + HALF, high, is_query)
    else:
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
    bias: torch.Tensor | None = None,
    norms: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Apply the rotary embedding and write the step's keys and values into their cache rows. `qkv` has them too
    afterwards, behind the queries as they were.

    `qkv` [rows, (heads + 2 kv_heads) * dim]; `heads` is (heads, kv_heads, dim); `rotations` float32 [positions, dim]
    has the cosines of half a head, then the sines; `slots` [rows] counts cache rows of kv_heads * dim values from the
    first of `keys` and of `values`, whose strides are those of one row; they may be float8_e4m3fn, where larger values
    become ±448. `bias` [(heads + 2 kv_heads) * dim] is added first. With `norms`, weights [2, dim] for queries and for
    keys and an epsilon, each head of these is normalised before it turns. Returns the queries, [rows, heads, dim].
    """
    weights, epsilon = norms or (qkv, 0.0)
    count, kv_count, dim = heads
    query = qkv.new_empty((len(qkv), count, dim))
    group, fp8 = 8, keys.dtype == torch.float8_e4m3fn
    _rotate_and_store[(len(qkv), triton.cdiv(count + 2 * kv_count, group))](
        qkv,
        query,
        rotations,
        positions,
        slots,
        keys,
        values,
        qkv if bias is None else bias,
        weights,
        epsilon,
        count,
        kv_count,
        dim,
        dim // 2,
        group,
        fp8,
        bias is not None,
        norms is not None,
        num_warps=4,
        launch_pdl=True,
    )
    return query


@triton.jit
def columns_from(row, columns, START: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, POLICY: tl.constexpr):
    """Load columns from START on of one or several rows of K: zeros beyond the last."""
    if START + BLOCK_K <= K:
        return tl.load(row + START, eviction_policy=POLICY)
    return tl.load(row + START, columns < K - START, 0.0, eviction_policy=POLICY)


@triton.jit
def weighed(value, weight, scale, dtype: tl.constexpr):
    """Return values of a row normalised by its scale, rounded as often as by `rms_norm`."""
    return ((value * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def scale_of(x, copy, epsilon, K: tl.constexpr, KP: tl.constexpr, COPY: tl.constexpr):
    """Return the scale that normalises a row of K values; the first program also copies the row."""
    columns = tl.arange(0, KP)
    values = tl.load(x + columns, columns < K, 0.0).to(tl.float32)
    if COPY:
        tl.store(copy + columns, values.to(copy.dtype.element_ty), (columns < K) & (tl.program_id(0) == 0))
    return tl.rsqrt(tl.sum(values * values) / K + epsilon)


@triton.jit
def fetch_lines(lines):
    """Have lines of memory brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _gemv(
    x, weight, channels, norm, out, copy, epsilon, N,
    K: tl.constexpr, FP8: tl.constexpr, NORM: tl.constexpr, COPY: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    FETCH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tiles = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    first = columns_from(tiles, k[None, :], 0, K, BLOCK_K, "evict_first")
    if GATED:
        first_up = columns_from(tiles + N * K, k[None, :], 0, K, BLOCK_K, "evict_first")
    if FP8:
        channel = tl.load(channels + n)
        if GATED:
            channel_up = tl.load(channels + N + n)
    if FETCH:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        fetch_lines(weight + n.to(tl.int64)[:, None] * K + tl.arange(0, KP // LINE)[None, :] * LINE)
    gdc_launch_dependents()
    gdc_wait()
    scale = 1.0
    if NORM:
        scale = scale_of(x, copy, epsilon, K, KP, COPY)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        value = columns_from(x + k, k, start, K, BLOCK_K, "").to(tl.float32)
        if NORM:
            weight_of_norm = columns_from(norm + k, k, start, K, BLOCK_K, "")
            value = weighed(value, weight_of_norm, scale, x.dtype.element_ty)
        if start == 0:
            tile = first
        else:
            tile = columns_from(tiles, k[None, :], start, K, BLOCK_K, "evict_first")
        acc += tile.to(tl.float32) * value[None, :]
        if GATED:
            if start == 0:
                tile_up = first_up
            else:
                tile_up = columns_from(tiles + N * K, k[None, :], start, K, BLOCK_K, "evict_first")
            acc_up += tile_up.to(tl.float32) * value[None, :]
    total = tl.sum(acc, 1)
    if FP8:
        total *= channel
    if GATED:
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate * tl.sigmoid(gate) * tl.sum(acc_up, 1)
        if FP8:
            total *= channel_up
    if ADD:
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(out + n).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty))


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    copy: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    fetch: bool = False,
    tile: tuple[int, int, int] = (8, 1024, 4),
) -> torch.Tensor:
    """x · weightᵀ for one row: x [1, K], weight [N, K]; one in float8_e4m3fn comes with the scales of its rows, float32
    [N].

    With `norm` (weight, epsilon) x is normalised first, and x itself is also written to `copy`, of its shape, if there
    is one; with `residual` [1, N] the product is added to it, in place; `gated` takes the first half of the weight's
    rows as gates and returns silu(gate) · up, [1, N / 2]. `fetch` has the weight brought to the L2 cache while the
    kernel before runs, which pays if that one leaves the memory idle and K is a power of two.
    """
    fp8 = isinstance(weight, tuple)
    weight, channels = weight if fp8 else (weight, x)
    K = x.shape[1]
    N = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, block_k, warps = tile_for(tile, N, K, gated)
    fetch = fetch and K >= 128  # whole lines of memory
    assert copy is None or norm is not None, "only a norm reads all of x at once"
    out = residual if residual is not None else x.new_empty((1, N))
    scale, epsilon = norm if norm is not None else (x, 0.0)
    _gemv[(N // block_n,)](
        x, weight, channels, scale, out, copied_to(copy, x)[0], epsilon, N,
        K, fp8, norm is not None, copy is not None, residual is not None, gated, fetch,
        block_n, block_k, triton.next_power_of_2(K), num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return out


def fits_gemv(shape: tuple[int, ...]) -> bool:
    """Return whether `gemv` takes a weight of this shape."""
    return shape[1] % 64 == 0 and shape[0] % 16 == 0


def tile_for(tile: tuple[int, int, int], n: int, k: int, gated: bool) -> tuple[int, int, int]:
    """Return the tile that suits a weight [n, k], or two such weights if it is gated.

    Rows of up to `_AT_ONCE` values are read in one pass. For wider ones at most a quarter of a tile is beyond the last
    column, which costs less than more passes. A tile of another width has as many values, of a gated weight half as
    many. Enough programs are left to keep all multiprocessors busy.
    """
    block_n, block_k, warps = tile
    width = triton.next_power_of_2(k) if k <= _AT_ONCE else block_k
    while k > _AT_ONCE and 3 * triton.cdiv(k, width) * width > 4 * k:
        width //= 2
    if width != block_k:
        block_n = min(16, max(1, block_n * block_k // (2 if gated else 1) // width))
    while n % block_n or (block_n > 1 and n // block_n < _LEAST_PROGRAMS):
        block_n //= 2
    return block_n, width, warps
