"""Attention of groups of tokens that see the same keys, each group in one pass over them: consecutive tokens of one
sequence, or decodes of sequences that share a prefix. Programs find in a worklist of the host's what they attend to, so
a step of any composition fits a CUDA graph.
"""

# mypy: ignore-errors

import math

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.embedded.models.cuda.decode_attention import joined_parts, over_tokens, store_part

PROGRAMS = 264
"""Two programs for each multiprocessor of an H200, as many as its registers have room for: work is divided into about
this many parts."""
_ROWS = 64
"""Rows of a product: the queries of a group's tokens, those of all heads that share keys."""
TILE = 64
_LEAST_TILES = 4
"""A program that attends to part of a group's keys takes this many tiles at least, as parts have to be put together."""
_MAX_SPLITS = 32


@triton.jit
def _store_result(out, sums, queries, heads, best, total, acc, exists, PREFIX: tl.constexpr):
    """Store what attention gives, or its state after a prefix, with which `decode_attention` goes on."""
    if PREFIX:
        tl.store(out + heads, acc, exists[:, None])
        tl.store(sums + 2 * queries, best, exists)
        tl.store(sums + 2 * queries + 1, total, exists)
    else:
        tl.store(out + heads, (acc / total[:, None]).to(out.dtype.element_ty), exists[:, None])


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "members", "work"])
def _attend_groups(
    query, keys, values, tables, slots, positions, members, work, out, sums, partial, counters, scale, width,
    block_stride, most,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    index, head = item // KV_HEADS, item % KV_HEADS
    member, d = tl.arange(0, PAD), tl.arange(0, DIM)
    gdc_launch_dependents()
    # The worklist is not written by a kernel. What is left of the programs ends here, but one always waits, so that the
    # kernel after this one does not begin before the one before it has ended.
    if index >= tl.load(work):
        if item == 0:
            gdc_wait()
        return
    gdc_wait()
    share = tl.load(work + 1)
    first = tl.load(work + 2 + index)
    count = tl.load(work + 2 + most + index)
    split = tl.load(work + 2 + 2 * most + index)
    row, final = first + member // GROUP, first + count - 1
    exists = member < count * GROUP
    if PREFIX:
        row, first, final = tl.load(members + row, exists, 0), tl.load(members + first), tl.load(members + final)
    last = tl.load(positions + row, exists, 0)
    length = tl.load(positions + final) + 1
    table = tables + tl.load(slots + first).to(tl.int64) * width
    inside = exists[:, None]
    queries = (row.to(tl.int64) * KV_HEADS + head) * GROUP + member % GROUP
    heads = queries[:, None] * DIM + d[None, :]
    q = tl.load(query + heads, inside, 0.0)
    if FP8:
        q = q.to(tl.float16)  # as in `decode_attention`
    best = tl.full((PAD,), float("-inf"), tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    acc = tl.zeros((PAD, DIM), tl.float32)
    tiles = tl.cdiv(length, TILE)
    used = tl.cdiv(tiles, share)
    own = tl.cdiv(tiles, used) * TILE
    begin = split * own
    end = tl.minimum(length, begin + own)
    best, total, acc = over_tokens(
        q, best, total, acc, keys, values, table, head, begin, end, last, scale, block_stride,
        KV_HEADS, DIM, BLOCK, TILE, STAGES, False, not PREFIX,
    )  # fmt: skip
    if used > 1:
        # Items of a group follow each other, those that are divided come first.
        group = (index - split) * KV_HEADS
        parts = partial + (group + head * used).to(tl.int64) * (PAD * (DIM + 2))
        store_part(parts + split * (PAD * (DIM + 2)), best, total, acc, inside, PAD, DIM)
        tl.debug_barrier()
        if tl.atomic_add(counters + group + head, 1, sem="acq_rel") == used - 1:
            tl.store(counters + group + head, 0)
            largest, weights, joined = joined_parts(parts, used, inside, PAD, DIM)
            _store_result(out, sums, queries, heads, largest, weights, joined, exists, PREFIX)
    else:
        _store_result(out, sums, queries, heads, best, total, acc, exists, PREFIX)


class GroupAttention:
    """Several new tokens of each sequence over its KV blocks, by online softmax; up to `rows` consecutive tokens of a
    sequence, and the heads that share keys, are rows of one product.

    Groups with many keys are divided among several programs, and the last of them to finish puts the parts together.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, scale: float, device: torch.device) -> None:
        self._heads = heads
        self._kv_heads = kv_heads
        self._dim = dim
        self._scale = scale / math.log(2)
        share = heads // kv_heads
        self._pad = max(_ROWS, triton.next_power_of_2(share))
        self.rows = self._pad // share
        """Maximum number of tokens in a group."""
        self.programs = max(PROGRAMS, kv_heads)
        """The number of programs that keep the device busy."""
        parts = 2 * self.programs  # see `plan`
        self._partial = torch.empty(parts * self._pad * (dim + 2), device=device)
        self._counters = torch.zeros(parts, dtype=torch.int32, device=device)

    def work_size(self, groups: int) -> int:
        """Return the number of values in a worklist for up to this many groups."""
        return 2 + 3 * (groups + self.programs // self._kv_heads)

    def plan(
        self, lengths: NDArray[np.int64], positions: NDArray[np.int32], work: NDArray[np.int32], before: int = 0
    ) -> None:
        """Write the worklist of a step's consecutive sequences into `work`, int32 [`work_size`].

        `lengths`: numbers of tokens of each; `positions` [tokens]; `before`: the number of tokens before these
        sequences. There are all tokens for which `work` was made: what is in no sequence is not attended to.

        The worklist is the number of items, the number of tiles that an item has at most, then rows of the first token
        of each item, of their numbers, and of which part of their keys it has. The longest come first, so that programs
        end at about the same time. An item's tiles are no fewer than a program's share of all, so groups that are
        divided have fewer than two items for each program.
        """
        groups = -(-lengths // self.rows)
        sequence = np.arange(len(lengths)).repeat(groups)
        offset = (np.arange(len(sequence)) - (groups.cumsum() - groups)[sequence]) * self.rows
        first = before + (lengths.cumsum() - lengths)[sequence] + offset
        count = np.minimum(self.rows, lengths[sequence] - offset)
        tiles = positions[first + count - 1] // TILE + 1
        longest_first = np.argsort(-tiles, kind="stable")
        tiles = tiles[longest_first]
        share = max(_LEAST_TILES, self._share(tiles), -(-int(tiles[0]) // _MAX_SPLITS))
        splits = -(-tiles // share)
        items, begun = longest_first.repeat(splits), (splits.cumsum() - splits).repeat(splits)
        work[:2] = len(items), share
        work[2:].reshape(3, -1)[:, : len(items)] = first[items], count[items], np.arange(len(items)) - begun

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        work: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """`query` and `out` [tokens, heads, dim]; a layer's `keys` and `values` [blocks, block_size, kv_heads, dim],
        those of these tokens among them; block tables `tables` int32 [slots, blocks]; `slots` and `positions` int32
        [tokens]; `work` by `plan`. Keys and values are of the query's type or float8_e4m3fn.
        """
        self._launch(query, keys, values, tables, slots, positions, work, work, out, out, False)

    def prefixes(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        slots: torch.Tensor,
        last: torch.Tensor,
        members: torch.Tensor,
        work: torch.Tensor,
        state: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        """Attend to prefixes that several decodes share, and store how far their softmax is: `state` float32 [tokens,
        heads, dim] are sums of values by weights, `sums` float32 [tokens, heads, 2] the largest score and the sum of
        the weights.

        `members` int32 [tokens]: rows of the sequences of each prefix, one prefix after the other; `last` int32
        [tokens]: the position of the last token of each row's prefix. `work` is planned as if members were the tokens
        of a step, with these positions.
        """
        self._launch(query, keys, values, tables, slots, last, members, work, state, sums, True)

    def _launch(self, query, keys, values, tables, slots, positions, members, work, out, sums, prefix) -> None:
        most = (len(work) - 2) // 3
        _attend_groups[(most * self._kv_heads,)](
            query, keys, values, tables, slots, positions, members, work, out, sums, self._partial, self._counters,
            self._scale, tables.shape[1], keys.stride(0), most, self._kv_heads, self._heads // self._kv_heads,
            self._pad, self._dim, keys.shape[1], TILE, 3, keys.dtype == torch.float8_e4m3fn, prefix, num_warps=4,
            launch_pdl=True,
        )  # fmt: skip

    def _share(self, tiles: NDArray[np.int64]) -> int:
        """Return how many tiles an item has at most, so that programs are done at the same time: if it can be, each
        with one item."""
        places = self.programs // self._kv_heads
        low, high = -(-int(tiles.sum()) // places), int(tiles[0])
        if len(tiles) > places:
            return low
        while low < high:
            middle = (low + high) // 2
            if int((-(-tiles // middle)).sum()) <= places:
                high = middle
            else:
                low = middle + 1
        return low
