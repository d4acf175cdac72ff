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
_MAX_SPLITS = 8


@triton.jit(do_not_specialize_on_alignment=["positions"])  # they follow any number of tokens in a step's inputs
def _attend(
    query, keys, values, tables, positions, out, partial, counters, scale, width, block_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    member, d = tl.arange(0, PAD), tl.arange(0, DIM)
    inside = (member < GROUP)[:, None]
    heads = ((row * KV_HEADS + head) * GROUP + member)[:, None] * DIM + d[None, :]
    gdc_launch_dependents()  # the product that follows may fetch its weights meanwhile
    gdc_wait()
    length = tl.load(positions + row) + 1
    share = tl.cdiv(tl.cdiv(length, TILE), SPLITS) * TILE
    q = tl.load(query + heads, inside, 0.0)
    if FP8:
        # Eight bits become float16 by a quarter of the instructions that bfloat16 takes, and none is lost.
        q = q.to(tl.float16)
    best = tl.full((PAD,), float("-inf"), tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    acc = tl.zeros((PAD, DIM), tl.float32)
    for start in tl.range(split * share, tl.minimum(length, (split + 1) * share), TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        exists = token < length
        block = tl.load(tables + row * width + token // BLOCK, exists, 0).to(tl.int64)
        cells = (block * block_stride + (token % BLOCK) * (KV_HEADS * DIM) + head * DIM)[:, None] + d[None, :]
        k = tl.load(keys + cells, exists[:, None], 0.0).to(q.dtype)
        score = tl.where(exists[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new = tl.maximum(best, tl.max(score, 1))
        shrink, weight = tl.exp2(best - new), tl.exp2(score - new[:, None])
        v = tl.load(values + cells, exists[:, None], 0.0).to(q.dtype)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
        total = total * shrink + tl.sum(weight, 1)
        best = new
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
    """One new token of each sequence over its KV blocks, by online softmax; the heads that share keys are rows of one
    product.

    While there are few sequences each is divided among several programs, and the last of them to finish puts the parts
    together.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, scale: float, device: torch.device) -> None:
        self._heads = heads
        self._kv_heads = kv_heads
        self._dim = dim
        self._scale = scale / math.log(2)
        self._pad = max(16, triton.next_power_of_2(heads // kv_heads))
        programs = max(_PROGRAMS + kv_heads, _MAX_SPLITS * kv_heads)
        self._partial = torch.empty(programs * self._pad * (dim + 2), device=device)
        self._counters = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """`query` and `out` [rows, heads, dim]; a layer's `keys` and `values` [blocks, block_size, kv_heads, dim];
        block tables `tables` int32 [rows, blocks]; `positions` int32 [rows] of the new tokens, whose keys and values
        are there already. Keys and values are of the query's type or float8_e4m3fn.
        """
        rows = len(query)
        splits = _splits(_PROGRAMS // (rows * self._kv_heads))
        tile, warps = (32, 2) if rows >= 128 else (64, 4)
        _attend[(rows, self._kv_heads, splits)](
            query, keys, values, tables, positions, out, self._partial, self._counters, self._scale, tables.shape[1],
            keys.stride(0), self._kv_heads, self._heads // self._kv_heads, self._pad, self._dim, keys.shape[1], tile,
            splits, 3, keys.dtype == torch.float8_e4m3fn, num_warps=warps, launch_pdl=True,
        )  # fmt: skip


def _splits(most: int) -> int:
    """Return a power of two, so that graphs of 1, 2, 4, ... rows have every variant compiled."""
    return min(_MAX_SPLITS, 1 << max(0, most.bit_length() - 1))
