"""Paged attention: the seam between transformers' model code and our KV blocks.

transformers calls `paged_attention` from every attention layer, with the queries, keys and values of the step's flat tokens. It hands
them to the `AttentionBackend` of the step, which writes keys and values into the blocks and attends over them. `SdpaAttention` is the
reference, for any device.
"""

import math
import mmap
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

from engine.embedded.scheduler import Chunk

ATTENTION_NAME = "trellis_paged"
MAX_PADDING = 1.25
"""Decodes attend in one batch as long as its padded length stays below this multiple of the real one."""


class KvCache:
    """Keys and values of all blocks, block-major: `data` has the shape [blocks, layers, 2, block_size, kv_heads, head_dim], so that all
    layers of a block are one contiguous range."""

    def __init__(
        self, num_blocks: int, layers: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = _zeros((num_blocks, layers, 2, block_size, heads, head_dim), dtype, device)
        self.layers, self.block_size, self.heads, self.head_dim = layers, block_size, heads, head_dim
        self.token_rows = self.data.view(-1, heads * head_dim)
        """[blocks * layers * 2 * block_size, heads * head_dim]"""
        self.block_rows = self.data.view(-1, block_size * heads * head_dim)
        """[blocks * layers * 2, block_size * heads * head_dim]"""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, since attention multiplies what lies behind a sequence's end by zero, and NaN would survive that.

    On a CPU they are anonymous pages, which take memory only once a block is written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class AttentionBackend(Protocol):
    """One step's attention. Built once per step from its chunks, then called once per layer."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """`query` [tokens, heads, head_dim], `key` and `value` [tokens, kv_heads, head_dim]; returns [tokens, heads, head_dim]."""
        ...


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    paged: AttentionBackend,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface for one row of flat tokens: [1, heads, tokens, head_dim] in, [1, tokens, heads, head_dim] out."""
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    return paged(module.layer_idx, query, key, value, scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences that decode together: their rows in the step, the gathered block rows of every layer, and the mask of the padding."""

    rows: slice
    gathered: Sequence_[torch.Tensor]
    """For each layer the flat [2 * count * width] indices of key, then value block rows."""
    length: int
    """Tokens of the longest."""
    mask: torch.Tensor | None
    """[count, 1, 1, length], 0 where there is a token and -inf behind the end; None if all are of one length."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence's chunk: its rows in the step, the gathered block rows of every layer, and the mask; both None for plain causal
    attention to itself."""

    rows: slice
    length: int
    gathered: Sequence_[torch.Tensor] | None
    mask: torch.Tensor | None


class SdpaAttention:
    """torch's scaled dot product attention over gathered blocks: decodes in padded batches, prompts one by one.

    `chunks` must be sorted so that decodes (length 1) come first, in order of length: `sort_chunks`. What the layers share is computed
    once, for all of them: a step of one token is bound by the number of operations.
    """

    def __init__(self, cache: KvCache, chunks: Sequence_[Chunk]) -> None:
        self._cache = cache
        self._written = self._of_layers(self._write_rows(chunks), cache.block_size)
        decodes = [chunk for chunk in chunks if chunk.length == 1]
        self._decodes = [self._decode_batch(first, decodes[first:last]) for first, last in pairwise(_cuts(decodes, cache.block_size))]
        self._prefills: list[_Prefill] = []
        row = len(decodes)
        for chunk in chunks[len(decodes) :]:
            self._prefills.append(self._prefill(row, chunk))
            row += chunk.length

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        self._cache.token_rows.index_copy_(0, self._written[layer], torch.cat((key, value)).flatten(1))
        outputs = [self._attend_decodes(batch, layer, query[batch.rows], scale) for batch in self._decodes]
        outputs += [self._attend_prefill(chunk, layer, query, key, value, scale) for chunk in self._prefills]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_decodes(self, batch: _Decodes, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """The queries that share a key head are rows of one attention, so that keys and values are read once for all of them."""
        keys, values = self._gather(batch.gathered[layer], len(query), batch.length)
        grouped = query.reshape(len(query), self._cache.heads, -1, query.shape[-1])
        return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.mask, scale=scale).reshape(query.shape)

    def _attend_prefill(
        self, chunk: _Prefill, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if chunk.gathered is None:
            keys, values = (part[chunk.rows].transpose(0, 1).unsqueeze(0) for part in (key, value))
        else:
            keys, values = self._gather(chunk.gathered[layer], 1, chunk.length)
        attended = functional.scaled_dot_product_attention(
            query[chunk.rows].transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)

    def _gather(self, rows: torch.Tensor, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `count` sequences, copied whole blocks at a time: each [count, kv_heads, length, head_dim]."""
        cache = self._cache
        blocks = cache.block_rows.index_select(0, rows).view(2, count, -1, cache.heads, cache.head_dim)
        keys, values = blocks[:, :, :length].transpose(2, 3).unbind(0)
        return keys, values

    def _of_layers(self, rows: torch.Tensor, values: int) -> Sequence_[torch.Tensor]:
        """For each layer the indices of its keys and then of its values, from those of layer 0's keys: `values` is the step between."""
        both = torch.cat((rows, rows + values))
        layers = torch.arange(self._cache.layers, device=rows.device).unsqueeze(1)
        return (both + layers * (2 * values)).unbind(0)

    def _write_rows(self, chunks: Sequence_[Chunk]) -> torch.Tensor:
        """The token row of layer 0's keys for every token of the step: [tokens]."""
        size, stride = self._cache.block_size, self._cache.layers * 2 * self._cache.block_size
        rows = [
            chunk.sequence.blocks[position // size] * stride + position % size
            for chunk in chunks
            for position in range(chunk.start, chunk.start + chunk.length)
        ]
        return torch.tensor(rows, device=self._cache.data.device)

    def _table(self, blocks: Sequence_[int], width: int) -> list[int]:
        stride = 2 * self._cache.layers
        return [block * stride for block in blocks[:width]] + [0] * (width - len(blocks))

    def _decode_batch(self, first: int, batch: Sequence_[Chunk]) -> _Decodes:
        cache = self._cache
        lengths = [chunk.start + 1 for chunk in batch]
        width = -(-lengths[-1] // cache.block_size)
        tables = torch.tensor([row for chunk in batch for row in self._table(chunk.sequence.blocks, width)], device=cache.data.device)
        mask = None
        if lengths[0] != lengths[-1]:
            behind = torch.arange(lengths[-1]) >= torch.tensor(lengths).unsqueeze(1)
            mask = torch.zeros(behind.shape, dtype=cache.data.dtype).masked_fill_(behind, -math.inf)[:, None, None].to(cache.data.device)
        return _Decodes(slice(first, first + len(batch)), self._of_layers(tables, 1), lengths[-1], mask)

    def _prefill(self, row: int, chunk: Chunk) -> _Prefill:
        size, device = self._cache.block_size, self._cache.data.device
        rows, end = slice(row, row + chunk.length), chunk.start + chunk.length
        if not chunk.start:
            return _Prefill(rows, end, None, None)
        table = torch.tensor(self._table(chunk.sequence.blocks, -(-end // size)), device=device)
        mask = torch.arange(end, device=device) <= torch.arange(chunk.start, end, device=device).unsqueeze(1)
        return _Prefill(rows, end, self._of_layers(table, 1), mask)


def sort_chunks(chunks: Sequence_[Chunk]) -> list[Chunk]:
    """Decodes first, by length, so that sequences of like length attend together; then prompts."""
    return sorted(chunks, key=lambda chunk: (chunk.length > 1, chunk.start))


def _cuts(decodes: Sequence_[Chunk], block_size: int) -> list[int]:
    """Where to cut decodes, sorted by length, into batches of little padding: the first index of each, and the end."""
    if not decodes:
        return []
    cuts, real = [0], 0
    for index, chunk in enumerate(decodes):
        width = chunk.start // block_size + 1
        if real and (index - cuts[-1] + 1) * width > MAX_PADDING * (real + width):
            cuts.append(index)
            real = 0
        real += width
    return [*cuts, len(decodes)]
