"""Attention of one new token of each sequence over its KV blocks: bound by the memory, of which it takes nine tenths
on an H200."""

# mypy: ignore-errors

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_PROGRAMS = 264
"""Two programs for each multiprocessor of an H200: attention is divided into this many while there are fewer
sequences."""
_LONG_PROGRAMS = 8 * _PROGRAMS
"""Programs for long sequences: so many that all multiprocessors have work until the end, whatever the number of
sequences."""
_LONG_TOKENS = 1024
"""Least tokens of each program then, so that parts cost little."""
_LONG_ROWS = 64
"""Maximum number of sequences for which that is done: more of them leave little to even out."""
_MAX_SPLITS = 32


_CONVERT_BYTES = (
    "{ .reg .b32 both; .reg .b16 low, high; prmt.b32 both, $1, 0, %s; mov.b32 {low, high}, both; "
    "cvt.rn.f16x2.e4m3x2 $0, low; }"
)
_CONVERT_EVEN, _CONVERT_ODD = (tl.constexpr(_CONVERT_BYTES % selected) for selected in ("0x4420", "0x4431"))


@triton.jit
def _converted(pairs, ODD: tl.constexpr):
    """Return the lower byte of each int16, or the upper one if ODD, from float8_e4m3fn to float16: two by one
    conversion."""
    return tl.inline_asm_elementwise(
        _CONVERT_ODD if ODD else _CONVERT_EVEN, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def over_tokens(
    q, best, total, acc, keys, values, table, head, begin, end, last, scale, block_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PAIRS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax, of state `best`, `total` and `acc`, over the tokens from `begin` to `end`; with
    CAUSAL, each row of `q` sees none after its own of `last`.

    PAIRS is for values in eight bits and products of 16 rows. Tensor cores take pairs of tokens from registers, and
    memory can be read in that order by 16 bits, but not by eight. So two dimensions of a value are read as one number.
    """
    d = tl.arange(0, DIM)
    odd = total
    if PAIRS:
        acc, odd = tl.split(tl.reshape(acc, (acc.shape[0], DIM // 2, 2)))
        values = values.to(tl.pointer_type(tl.int16))
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        exists = token < end
        block = tl.load(table + token // BLOCK, exists, 0).to(tl.int64)
        row = (block * block_stride + (token % BLOCK) * (KV_HEADS * DIM) + head * DIM)[:, None]
        cells = row + d[None, :]
        k = tl.load(keys + cells, exists[:, None], 0.0).to(q.dtype)
        seen = exists[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= last[:, None])
        score = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new = tl.maximum(best, tl.max(score, 1))
        base = new
        if CAUSAL:
            base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
        shrink, weight = tl.exp2(best - base), tl.exp2(score - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(q.dtype)
        if PAIRS:
            v = tl.load(values + row // 2 + tl.arange(0, DIM // 2)[None, :], exists[:, None], 0)
            acc = tl.dot(weight, _converted(v, False), acc * shrink[:, None])
            odd = tl.dot(weight, _converted(v, True), odd * shrink[:, None])
        else:
            v = tl.load(values + cells, exists[:, None], 0.0).to(q.dtype)
            acc = tl.dot(weight, v, acc * shrink[:, None])
        best = new
    if PAIRS:
        acc = tl.interleave(acc, odd)
    return best, total, acc


@triton.jit
def store_part(part, best, total, acc, inside, PAD: tl.constexpr, DIM: tl.constexpr):
    """Store the state of a softmax over some of the tokens: for the rows that are `inside`, [PAD, 1]."""
    member, d = tl.arange(0, PAD), tl.arange(0, DIM)
    tl.store(part + member, best)
    tl.store(part + PAD + member, total)
    tl.store(part + 2 * PAD + member[:, None] * DIM + d[None, :], acc, inside)


@triton.constexpr_function
def _joined_at_once(pad):
    """Return how many parts of `pad` rows are loaded without waiting for each other."""
    return max(128 // pad, 2)


@triton.jit
def joined_parts(parts, used, inside, PAD: tl.constexpr, DIM: tl.constexpr):
    """Return the state of a softmax over all tokens, from `used` parts that other programs have stored."""
    AHEAD: tl.constexpr = _joined_at_once(PAD)
    member, d = tl.arange(0, PAD), tl.arange(0, DIM)
    best = tl.full((PAD,), float("-inf"), tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    acc = tl.zeros((PAD, DIM), tl.float32)
    for first in range(0, used, AHEAD):
        for other in tl.static_range(AHEAD):  # whose loads do not wait for each other
            exists = first + other < used
            its = parts + (first + other) * (PAD * (DIM + 2))
            its_best = tl.load(its + member, (member < PAD) & exists, float("-inf"), cache_modifier=".cg")
            its_total = tl.load(its + PAD + member, (member < PAD) & exists, 0.0, cache_modifier=".cg")
            its_acc = tl.load(
                its + 2 * PAD + member[:, None] * DIM + d[None, :], inside & exists, 0.0, cache_modifier=".cg"
            )
            new = tl.maximum(best, its_best)
            base = tl.where(new == float("-inf"), 0.0, new)
            shrink, weight = tl.exp2(best - base), tl.exp2(its_best - base)
            total = total * shrink + its_total * weight
            acc = acc * shrink[:, None] + its_acc * weight[:, None]
            best = new
    return best, total, acc


@triton.jit(
    do_not_specialize=["few", "splits"],  # few variants to compile
    do_not_specialize_on_alignment=["positions", "count", "shared"],  # they follow any number of a step's inputs
)
def _attend(
    query, keys, values, tables, positions, count, out, partial, counters, shared, state, sums, scale, width,
    block_stride, few, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, LONG_TILES: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
    CASCADE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    member, d = tl.arange(0, PAD), tl.arange(0, DIM)
    inside = (member < GROUP)[:, None]
    queries = (row * KV_HEADS + head) * GROUP + member
    heads = queries[:, None] * DIM + d[None, :]
    gdc_launch_dependents()  # the product that follows may fetch its weights meanwhile
    if COUNTED:
        if row >= tl.load(count):  # as in `group_attention`, one of those that have nothing to do waits
            if (row == 0) & (head == 0):
                gdc_wait()
            return
    gdc_wait()
    length = tl.load(positions + row) + 1
    done = 0
    if CASCADE:
        done = tl.load(shared + row)
    # A short sequence uses fewer splits than there are, and a long one more than `few`: each has two tiles at least, or
    # LONG_TILES. But as many splits as are joined at once have a tile each.
    tiles = tl.cdiv(length - done, TILE)
    short = tl.where(tiles > 2, tl.maximum(tl.minimum(tiles, _joined_at_once(PAD)), tl.cdiv(tiles, 2)), 1)
    share = tl.cdiv(tiles, tl.maximum(tl.minimum(few, short), tl.minimum(splits, tiles // LONG_TILES)))
    used = tl.cdiv(tiles, share)
    if split >= used:
        return
    q = tl.load(query + heads, inside, 0.0)
    if FP8:
        # Keys and values become float16 by a quarter of the instructions that bfloat16 takes, and lose no bit.
        q = q.to(tl.float16)
    best = tl.full((PAD,), float("-inf"), tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    acc = tl.zeros((PAD, DIM), tl.float32)
    if CASCADE:
        known = (member < GROUP) & (done > 0) & (split == 0)
        best = tl.load(sums + 2 * queries, known, float("-inf"))
        total = tl.load(sums + 2 * queries + 1, known, 0.0)
        acc = tl.load(state + heads, known[:, None], 0.0)
    begin = done + split * (share * TILE)
    end = tl.minimum(length, begin + share * TILE)
    best, total, acc = over_tokens(
        q, best, total, acc, keys, values, tables + row * width, head, begin, end, length, scale, block_stride,
        KV_HEADS, DIM, BLOCK, TILE, STAGES, FP8, False,
    )  # fmt: skip
    if SPLIT:
        if used > 1:
            pair = row * KV_HEADS + head
            parts = partial + pair * splits * (PAD * (DIM + 2))
            store_part(parts + split * (PAD * (DIM + 2)), best, total, acc, inside, PAD, DIM)
            tl.debug_barrier()
            if tl.atomic_add(counters + pair, 1, sem="acq_rel") == used - 1:  # the last one puts all parts together
                tl.store(counters + pair, 0)
                _, weights, joined = joined_parts(parts, used, inside, PAD, DIM)
                tl.store(out + heads, (joined / weights[:, None]).to(out.dtype.element_ty), inside)
        else:
            tl.store(out + heads, (acc / total[:, None]).to(out.dtype.element_ty), inside)
    else:
        tl.store(out + heads, (acc / total[:, None]).to(out.dtype.element_ty), inside)


class DecodeAttention:
    """One new token of each sequence over its KV blocks, by online softmax; the heads that share keys are rows of one
    product.

    While there are few sequences, and where they are long, each is divided among several programs, as many as its
    length is worth, and the last of them to finish puts the parts together.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, scale: float, device: torch.device) -> None:
        self._heads = heads
        self._kv_heads = kv_heads
        self._dim = dim
        self._scale = scale / math.log(2)
        self._pad = max(16, triton.next_power_of_2(heads // kv_heads))
        programs = max(_LONG_PROGRAMS, kv_heads)  # a product of rows, heads and splits that are more than one
        self.parts = torch.empty(programs * self._pad * (dim + 2), device=device)
        """Softmaxes over some tokens of a sequence, by sequence, head and split, until they are put together."""
        self._counters = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        cascade: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        count: torch.Tensor | None = None,
    ) -> None:
        """`query` and `out` [rows, heads, dim]; a layer's `keys` and `values` [blocks, block_size, kv_heads, dim];
        block tables `tables` int32 [rows, blocks]; `positions` int32 [rows] of the new tokens, whose keys and values
        are there already. Keys and values are of the query's type or float8_e4m3fn.

        `cascade`: how many of its first tokens each row has attended to already, int32 [rows], and the states of its
        heads after these, as `GroupAttention.prefixes` stores them. `count`: the number of rows to attend to, int32
        [1], if it is not all of them; then no row is divided.
        """
        shared, state, sums = cascade or (positions, self.parts, self.parts)
        rows = len(query)
        pairs = rows * self._kv_heads
        few = _splits(_PROGRAMS // pairs) if count is None else 1
        splits = _splits(_LONG_PROGRAMS // pairs) if count is None and rows <= _LONG_ROWS else few
        fp8 = keys.dtype == torch.float8_e4m3fn
        if fp8:
            tile, warps = (128, 4) if rows < 16 or self._pad > 16 else (64, 2)
        else:
            tile, warps = (32, 2) if rows >= 128 and count is None else (64, 8 if rows == 1 else 4)
        _attend[(rows, self._kv_heads, splits)](
            query, keys, values, tables, positions, positions if count is None else count, out, self.parts,
            self._counters, shared, state, sums, self._scale, tables.shape[1], keys.stride(0), few, splits,
            self._kv_heads, self._heads // self._kv_heads, self._pad, self._dim, keys.shape[1], tile, splits > 1,
            _LONG_TOKENS // tile, 3, fp8, cascade is not None, count is not None, num_warps=warps, launch_pdl=True,
        )  # fmt: skip


def _splits(most: int) -> int:
    return max(1, min(_MAX_SPLITS, most))
