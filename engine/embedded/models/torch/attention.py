"""Paged attention over our KV blocks in torch's operations: the reference, for any device.

An `AttentionBackend` gets the queries, keys and values of a step's flat tokens from every attention layer, writes keys
and values into the blocks and attends over them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from engine.embedded.kv.blocks import first_block
from engine.embedded.kv.cache import KvCache
from engine.embedded.kv.groups import Table
from engine.embedded.kv.layout import LayerGroup
from engine.embedded.models.runner import EmbeddingRows, StepInput

MAX_PADDING = 1.25
"""Decodes attend in one batch as long as its padded length stays below this multiple of the real one."""


class AttentionBackend(Protocol):
    """One step's attention. Built once per step, then called once per layer."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, **options: Any
    ) -> torch.Tensor:
        """`query` [tokens, heads, head_dim], `key` and `value` [tokens, kv_heads, head_dim]; returns [tokens, heads,
        head_dim].

        `options` are those that the layer has of `sliding_window`, `softcap` and `s_aux`, its sinks.
        """
        ...


class StepAttention:
    """A step's attention for all layers: each group has its own tables and cache."""

    def __init__(self, caches: Sequence[KvCache], groups: Sequence[LayerGroup], step: StepInput) -> None:
        self._of_layer: dict[int, tuple[SdpaAttention, int]] = {}
        for index, (cache, group) in enumerate(zip(caches, groups, strict=True)):
            attention = SdpaAttention(cache, step, [tables[index] for tables in step.tables], group.window)
            self._of_layer.update((layer, (attention, number)) for number, layer in enumerate(group.layers))

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, **options: Any
    ) -> torch.Tensor:
        attention, number = self._of_layer[layer]
        return attention(number, query, key, value, _Scores(scale, options.get("softcap")))


class _Scores(NamedTuple):
    """Parameters by which products of queries and keys become scores."""

    scale: float
    softcap: float | None
    """Bound that scores approach, as in Gemma 2; None for none."""


class _Decodes(NamedTuple):
    """Sequences that decode together: their rows in the step, the gathered block rows of every layer, and the mask
    of the padding."""

    rows: slice
    gathered: Sequence[torch.Tensor]
    """Flat indices of each layer's key, then value block rows, [2 * count * width]."""
    length: int
    """Number of tokens of the longest sequence, from its first block on."""
    mask: torch.Tensor | None
    """[count, 1, 1, length], 0 where there is a token in sight and -inf elsewhere; None if that is everywhere."""


class _PromptPart(NamedTuple):
    """Some consecutive tokens of one prompt: their rows in the step, the gathered block rows of every layer, None if
    it attends to itself alone, and the mask, None for a causal one."""

    rows: slice
    length: int
    """Number of tokens from its first block on."""
    gathered: Sequence[torch.Tensor] | None
    mask: torch.Tensor | None


class SdpaAttention:
    """torch's scaled dot product attention over a group's gathered blocks: decodes in padded batches, prompts one by
    one.

    `tables` are those of the step's sequences in the group. Decodes should be in order of length: `sort_decodes`. What
    the layers share is computed once, for all of them: a step of one token is bound by the number of operations.
    """

    def __init__(self, cache: KvCache, step: StepInput, tables: Sequence[Table], window: int | None) -> None:
        self._cache = cache
        self._window = window
        self._written = self._of_layers(self._write_rows(step, tables), cache.block_size)
        singles = step.singles
        decodes = list(zip(step.starts[:singles], tables[:singles], strict=True))
        widths = [position // cache.block_size + 1 - self._first(position) for position, _ in decodes]
        self._decodes = [self._decode_batch(first, decodes[first:last]) for first, last in pairwise(_cuts(widths))]
        self._prompts: list[_PromptPart] = []
        row = singles
        for start, length, table in zip(step.starts[singles:], step.lengths[singles:], tables[singles:], strict=True):
            self._prompts.append(self._prompt_part(row, start, length, table))
            row += length

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: _Scores
    ) -> torch.Tensor:
        """Attend as an `AttentionBackend` does; `layer` is the layer's number in the group."""
        self._cache.token_rows.index_copy_(0, self._written[layer], torch.cat((key, value)).flatten(1))
        outputs = [self._attend_decodes(batch, layer, query[batch.rows], scores) for batch in self._decodes]
        outputs += [self._attend_prompt(part, layer, query, (key, value), scores) for part in self._prompts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_decodes(self, batch: _Decodes, layer: int, query: torch.Tensor, scores: _Scores) -> torch.Tensor:
        """Attend for a batch of decodes. The queries that share a key head are rows of one attention, so that keys
        and values are read once for all of them."""
        keys, values = self._gather(batch.gathered[layer], len(query), batch.length)
        grouped = query.reshape(len(query), self._cache.heads, -1, query.shape[-1])
        return _attend(grouped, keys, values, batch.mask, scores).reshape(query.shape)

    def _attend_prompt(
        self,
        part: _PromptPart,
        layer: int,
        query: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        scores: _Scores,
    ) -> torch.Tensor:
        if part.gathered is None:
            keys, values = (mine[part.rows].transpose(0, 1).unsqueeze(0) for mine in own)
        else:
            keys, values = self._gather(part.gathered[layer], 1, part.length)
        queries = query[part.rows].transpose(0, 1).unsqueeze(0)
        return _attend(queries, keys, values, part.mask, scores, causal=part.mask is None)[0].transpose(0, 1)

    def _gather(self, rows: torch.Tensor, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of `count` sequences, each [count, kv_heads, length, head_dim]."""
        cache = self._cache
        blocks = cache.block_rows.index_select(0, rows).view(2, count, -1, cache.heads, cache.head_dim)
        keys, values = blocks[:, :, :length].transpose(2, 3).unbind(0)
        return keys, values

    def _of_layers(self, rows: torch.Tensor, values: int) -> Sequence[torch.Tensor]:
        """Return for each layer the indices of its keys and then of its values, from those of layer 0's keys:
        `values` is the distance between them."""
        both = torch.cat((rows, rows + values))
        layers = torch.arange(self._cache.layers, device=rows.device).unsqueeze(1)
        return (both + layers * (2 * values)).unbind(0)

    def _write_rows(self, step: StepInput, tables: Sequence[Table]) -> torch.Tensor:
        """Return the token row of layer 0's keys for every token of the step: [tokens]."""
        size, stride = self._cache.block_size, self._cache.layers * 2 * self._cache.block_size
        rows = [
            table[position // size] * stride + position % size
            for start, length, table in zip(step.starts, step.lengths, tables, strict=True)
            for position in range(start, start + length)
        ]
        return torch.tensor(rows, device=self._cache.data.device)

    def _first(self, position: int) -> int:
        """Return the index of the first block that a token attends to."""
        return first_block(position, self._window, self._cache.block_size)

    def _key_rows(self, blocks: Sequence[int], width: int) -> list[int]:
        """Return the row of layer 0's keys for each block, padded to `width`."""
        stride = 2 * self._cache.layers
        return [block * stride for block in blocks] + [0] * (width - len(blocks))

    def _decode_batch(self, row: int, batch: Sequence[tuple[int, Table]]) -> _Decodes:
        size, device = self._cache.block_size, self._cache.data.device
        firsts = [self._first(position) for position, _ in batch]
        lengths = [position + 1 - first * size for (position, _), first in zip(batch, firsts, strict=True)]
        longest = max(lengths)
        width = -(-longest // size)
        rows: list[int] = []
        for (position, table), first in zip(batch, firsts, strict=True):
            rows += self._key_rows(table[first : position // size + 1], width)
        mask = None
        if min(lengths) != longest or longest > (self._window or longest):
            ends, index = torch.tensor(lengths).unsqueeze(1), torch.arange(longest)
            hidden = index >= ends
            if self._window is not None:
                hidden |= index < ends - self._window
            mask = (
                torch.zeros(hidden.shape, dtype=self._cache.data.dtype)
                .masked_fill_(hidden, -math.inf)[:, None, None]
                .to(device)
            )
        return _Decodes(
            slice(row, row + len(batch)), self._of_layers(torch.tensor(rows, device=device), 1), longest, mask
        )

    def _prompt_part(self, row: int, start: int, length: int, table: Table) -> _PromptPart:
        size, device = self._cache.block_size, self._cache.data.device
        rows, end = slice(row, row + length), start + length
        first = self._first(start)
        gathered, mask = None, None
        if start:
            blocks = table[first : -(-end // size)]
            gathered = self._of_layers(torch.tensor(self._key_rows(blocks, len(blocks)), device=device), 1)
        if start or (self._window is not None and end > self._window):
            queries = torch.arange(start, end, device=device).unsqueeze(1)
            keys = torch.arange(first * size, end, device=device)
            mask = keys <= queries
            if self._window is not None:
                mask &= keys > queries - self._window
        return _PromptPart(rows, end - first * size, gathered, mask)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scores: _Scores,
    causal: bool = False,
) -> torch.Tensor:
    """`query` [batch, heads, tokens, head_dim], `keys` and `values` [batch, kv_heads, length, head_dim]; returns the
    shape of `query`."""
    if scores.softcap is None:
        return functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            scale=scores.scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
    keys, values = (part.repeat_interleave(query.shape[1] // keys.shape[1], 1) for part in (keys, values))
    weights = torch.tanh(query @ keys.transpose(2, 3) * (scores.scale / scores.softcap)) * scores.softcap
    if causal:
        mask = torch.ones(weights.shape[2:], dtype=torch.bool, device=weights.device).tril_()
    if mask is not None:
        weights = weights.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else weights + mask
    return weights.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def sort_decodes(step: StepInput) -> StepInput:
    """Return the same step with its decodes by position, so that sequences of like length attend together. The
    wanted rows keep their order."""
    order = sorted(range(step.singles), key=step.starts.__getitem__)
    if order == list(range(len(order))):
        return step
    rest = range(len(order), len(step.tokens))
    sequences = [*order, *range(len(order), len(step.lengths))]
    flat = [*order, *rest]
    place = [0] * len(flat)
    for new, old in enumerate(flat):
        place[old] = new
    shown = step.embeddings
    return replace(
        step,
        tokens=[step.tokens[row] for row in flat],
        positions=[step.positions[row] for row in flat],
        starts=[step.starts[index] for index in sequences],
        slots=[step.slots[index] for index in sequences],
        admissions=[step.admissions[index] for index in sequences],
        tables=[step.tables[index] for index in sequences],
        sampled=[step.sampled[index] for index in sequences],
        rows=[place[row] for row in step.rows],
        embeddings=None if shown is None else EmbeddingRows([place[row] for row in shown.rows], shown.embeddings),
        rope_positions=None if step.rope_positions is None else step.rope_positions[:, flat],
    )


def _cuts(widths: Sequence[int]) -> list[int]:
    """Return where to cut decodes into batches of little padding: the first index of each batch, and the end.
    `widths` is how many blocks each attends to, in rising order give or take one."""
    if not widths:
        return []
    cuts, real, widest = [0], 0, 0
    for index, width in enumerate(widths):
        widest = max(widest, width)
        if real and (index - cuts[-1] + 1) * widest > MAX_PADDING * (real + width):
            cuts.append(index)
            real, widest = 0, width
        real += width
    return [*cuts, len(widths)]
