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
        """`query` [heads, tokens, head_dim], `key` and `value` [kv_heads, tokens, head_dim]; returns [tokens, heads, head_dim]."""
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
    return paged(module.layer_idx, query[0], key[0], value[0], scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences that decode together: their rows in the step, block tables padded to one width, and the mask of the padding."""

    rows: slice
    tables: torch.Tensor
    """Flat [count * width] indices of key block rows of layer 0."""
    mask: torch.Tensor
    """[count, 1, 1, width * block_size], True where there is a token."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence's chunk: its rows in the step, its block table, and the mask, or None for plain causal attention to itself."""

    rows: slice
    table: torch.Tensor
    length: int
    mask: torch.Tensor | None


class SdpaAttention:
    """torch's scaled dot product attention over gathered blocks: decodes in padded batches, prompts one by one.

    `chunks` must be sorted so that decodes (length 1) come first, in order of length: `sort_chunks`.
    """

    def __init__(self, cache: KvCache, chunks: Sequence_[Chunk]) -> None:
        self._cache = cache
        self._write = self._write_rows(chunks)
        decodes = [chunk for chunk in chunks if chunk.length == 1]
        self._decodes = [self._decode_batch(first, decodes[first:last]) for first, last in pairwise(_cuts(decodes, cache.block_size))]
        self._prefills: list[_Prefill] = []
        row = len(decodes)
        for chunk in chunks[len(decodes) :]:
            self._prefills.append(self._prefill(row, chunk))
            row += chunk.length

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        cache, width = self._cache, self._cache.heads * self._cache.head_dim
        offset = layer * 2 * cache.block_size
        cache.token_rows.index_copy_(0, self._write + offset, key.transpose(0, 1).reshape(-1, width))
        cache.token_rows.index_copy_(0, self._write + (offset + cache.block_size), value.transpose(0, 1).reshape(-1, width))
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        for batch in self._decodes:
            keys, values = self._gather(layer, batch.tables, len(batch.mask))
            queries = query[:, batch.rows].transpose(0, 1).unsqueeze(2)
            attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=batch.mask, scale=scale, enable_gqa=True)
            out[batch.rows] = attended.squeeze(2)
        for chunk in self._prefills:
            if chunk.mask is None:
                keys, values = key[:, chunk.rows].unsqueeze(0), value[:, chunk.rows].unsqueeze(0)
            else:
                keys, values = (part[:, :, : chunk.length] for part in self._gather(layer, chunk.table, 1))
            attended = functional.scaled_dot_product_attention(
                query[:, chunk.rows].unsqueeze(0),
                keys,
                values,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=scale,
                enable_gqa=True,
            )
            out[chunk.rows] = attended[0].transpose(0, 1)
        return out

    def _gather(self, layer: int, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `count` sequences, whole blocks at a time: each [count, kv_heads, tokens, head_dim]."""
        cache = self._cache
        rows = table + 2 * layer
        keys, values = (
            cache.block_rows.index_select(0, rows + part).view(count, -1, cache.heads, cache.head_dim).transpose(1, 2) for part in (0, 1)
        )
        return keys, values

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
        size, device = self._cache.block_size, self._cache.data.device
        lengths = [chunk.start + 1 for chunk in batch]
        width = -(-lengths[-1] // size)
        tables = torch.tensor([row for chunk in batch for row in self._table(chunk.sequence.blocks, width)], device=device)
        mask = torch.arange(width * size, device=device) < torch.tensor(lengths, device=device).unsqueeze(1)
        return _Decodes(slice(first, first + len(batch)), tables, mask[:, None, None])

    def _prefill(self, row: int, chunk: Chunk) -> _Prefill:
        size, device = self._cache.block_size, self._cache.data.device
        end = chunk.start + chunk.length
        table = torch.tensor(self._table(chunk.sequence.blocks, -(-end // size)), device=device)
        mask = None
        if chunk.start:
            mask = torch.arange(end, device=device) <= torch.arange(chunk.start, end, device=device).unsqueeze(1)
        return _Prefill(slice(row, row + chunk.length), table, end, mask)


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
