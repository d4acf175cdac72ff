"""Attention over our KV blocks on a GPU: FlashInfer for prompts, kernels of our own for decodes and for short chunks.

What a decode needs lives on the device: a table of blocks for each running sequence, and positions, from which lengths
and cache rows follow. So a decode step needs no planning and fits a CUDA graph. A step with chunks of several tokens
fits one with a worklist that the host writes, and so does one whose decodes share prefixes. What FlashInfer computes is
planned on the host, once for each step; its kernels may come later (`flashinfer_kernels.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.embedded.kv.cache import KvCache
from engine.embedded.models.cuda.decode_attention import DecodeAttention
from engine.embedded.models.cuda.group_attention import GroupAttention
from engine.embedded.models.cuda.prefixes import SharedPrefix, SharedPrefixes
from engine.embedded.models.cuda.step_kernels import locate
from engine.embedded.models.devices import to_device
from engine.embedded.models.runner import StepInput

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Attention of one step: its decodes first, then its prompts."""

    rows: torch.Tensor
    """int64 [tokens]: the cache row of each token's keys in layer 0."""
    decodes: int
    tables: torch.Tensor
    """int32 [decodes, blocks]: the block table of each decode."""
    positions: torch.Tensor
    """int32 [decodes]: the position of each decode's new token."""
    prompts: "_PromptPlan | None"
    groups: "_Groups | None" = None
    """The step's tokens that are computed in groups."""
    count: torch.Tensor | None = None
    """int32 [1]: how many decodes there are, if the graph does not know it. `decodes` is the number of all tokens then,
    and those that are no decodes are in groups."""
    shared: "_Shared | None" = None
    """Prefixes of its decodes that are attended to first."""


class _Groups(NamedTuple):
    slots: torch.Tensor
    positions: torch.Tensor
    work: torch.Tensor


class _Shared(NamedTuple):
    tables: torch.Tensor
    """int32 [slots, blocks]"""
    slots: torch.Tensor
    last: torch.Tensor
    members: torch.Tensor
    work: torch.Tensor
    tokens: torch.Tensor
    """int32 [decodes]: the number of tokens of the prefix of each."""
    state: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class _PromptPlan:
    wrapper: Any
    ragged: bool
    """Whether no prompt has anything before its tokens in this step, so that keys and values are those of the step."""


class CudaAttention:
    """The tables of running sequences, and attention over them."""

    def __init__(
        self, cache: KvCache, heads: int, scale: float, dtype: torch.dtype, max_num_seqs: int, context_length: int
    ) -> None:
        self._cache = cache
        self._heads = heads
        self._scale = scale
        self._dtype = dtype
        """Type of queries, and of keys and values that are not in the cache."""
        self._device = cache.data.device
        self.width = -(-context_length // cache.block_size)
        self.tables = torch.full(
            (max_num_seqs + 1, self.width), len(cache.data) - 1, dtype=torch.int32, device=self._device
        )
        """int32 [slots + 1, blocks]; the last row is for the padding of graphs, and like all that is unused it names
        the spare block."""
        self._blocks: NDArray[np.int32] = np.zeros(self.tables.shape, dtype=np.int32)
        """The tables, on the host."""
        self._prefixes = SharedPrefixes(self._blocks, cache.block_size)
        self._tabled = [(-1, 0)] * (max_num_seqs + 1)
        """Admission of the sequence in each slot's row, and the number of its blocks that the row has."""
        self._layers = [(cache.data[:, layer, 0], cache.data[:, layer, 1]) for layer in range(cache.layers)]
        self._stride = cache.layers * 2 * cache.block_size
        sizes = heads, cache.heads, cache.head_dim, scale, self._device
        self._decode = DecodeAttention(*sizes)
        self._group = GroupAttention(*sizes)
        self.group_rows = self._group.rows
        """Maximum number of tokens of a sequence that share a pass over its keys in `chunks`."""
        # Two of each, in turn: a plan is copied from pinned memory that the next one overwrites.
        self._workspaces = [torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._wrappers: list[tuple[Any, Any]] = []

    @property
    def plans(self) -> bool:
        """Whether FlashInfer computes prompts, as `mixed` needs."""
        return bool(self._wrappers)

    def use_flashinfer(self) -> None:
        """Have FlashInfer compute prompts from now on; its kernels are loaded."""
        import flashinfer  # noqa: PLC0415 - slow to import; `FlashInferKernels` has done that

        self._wrappers = [
            (
                flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD"),
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"),
            )
            for workspace in self._workspaces
        ]

    def forget_flashinfer(self) -> None:
        self._wrappers = []

    def note_blocks(
        self, slots: Sequence[int], admissions: Sequence[int], tables: Sequence[Sequence[list[int]]]
    ) -> None:
        """Bring the tables of slots up to date; arguments as in `StepInput`."""
        cells: list[int] = []
        blocks: list[int] = []
        tabled: dict[int, tuple[int, int]] = {}
        for slot, admission, (table,) in zip(slots, admissions, tables, strict=True):
            owner, known = self._tabled[slot]
            if owner != admission:
                known = 0
            if known < len(table):
                cells += range(slot * self.width + known, slot * self.width + len(table))
                blocks += table[known:]
                self._blocks[slot, known : len(table)] = table[known:]
                tabled[slot] = (admission, len(table))
        if cells:
            update = to_device([cells, blocks], torch.int64, self._device)
            self.tables.view(-1)[update[0]] = update[1].int()
            for slot, entry in tabled.items():  # last: what has failed is written again
                self._tabled[slot] = entry

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, [blocks, block_size, kv_heads, head_dim] each."""
        return self._layers[index]

    def decode(self, slots: torch.Tensor, positions: torch.Tensor) -> AttentionStep:
        """Prepare a step of decodes alone, all of it on the device. `slots` and `positions`: int32 [tokens]."""
        rows, tables = self._located(slots, positions, copy=True)
        return AttentionStep(rows, len(slots), tables, positions, None)

    def chunks_size(self, tokens: int) -> int:
        """Return the number of values that `chunks` and `beside_chunks` take besides slots and positions."""
        return 1 + self._group.work_size(tokens)

    def plan_chunks(
        self, lengths: Sequence[int], decodes: int, positions: NDArray[np.int32], values: NDArray[np.int32]
    ) -> None:
        """Write what `chunks` and `beside_chunks` take, int32 [chunks_size], for consecutive sequences of these
        lengths. The first `decodes` of them, of one token each, are computed apart; `chunks` needs 0. Further
        positions, those of padding, count as one more sequence."""
        counts = np.array([*lengths[decodes:], len(positions) - sum(lengths)])
        values[0] = decodes
        self._group.plan(counts, positions, values[1:], decodes)

    def chunks(self, slots: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> AttentionStep:
        """Prepare a step of sequences of any length, all of it on the device. `slots` and `positions`: int32 [tokens];
        `values` by `plan_chunks`."""
        groups = _Groups(slots, positions, values[1:])
        rows, tables = self._located(slots, positions)
        return AttentionStep(rows, 0, tables, positions, None, groups)

    def are_even(self, lengths: Sequence[int]) -> bool:
        """Return whether decodes behind so many tokens keep the device busy until the longest of them ends, although
        `beside_chunks` divides none among programs."""
        return bool(lengths) and self._cache.heads * sum(lengths) >= self._group.programs * max(lengths)

    def beside_chunks(self, slots: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> AttentionStep:
        """Prepare a step of many decodes, then sequences of any length; arguments as of `chunks`. Decodes apart are
        faster: in a group each takes the work of 16 tokens."""
        groups = _Groups(slots, positions, values[1:])
        return replace(self.decode(slots, positions), groups=groups, count=values[:1])

    def prefixes(self, step: StepInput) -> list[SharedPrefix]:
        """Return the prefixes that a step's decodes share, if it has no other tokens."""
        if step.singles < len(step.lengths):
            return []
        if self._prefixes.changed(step.slots, step.admissions):
            self.note_blocks(step.slots, step.admissions, step.tables)
        return self._prefixes.find(step.slots, step.admissions, step.positions)

    def cascade_size(self, tokens: int) -> int:
        """Return the number of values that `cascade` takes besides slots and positions."""
        return 3 * tokens + self._group.work_size(tokens // self.group_rows + self._prefixes.most(tokens))

    def plan_cascade(self, prefixes: Sequence[SharedPrefix], values: NDArray[np.int32], tokens: int) -> None:
        """Write what `cascade` takes, int32 [cascade_size], for a step of this many tokens with these prefixes."""
        (shared, last, members), work = values[: 3 * tokens].reshape(3, tokens), values[3 * tokens :]
        if not prefixes:
            return
        counts = [len(prefix.rows) for prefix in prefixes]
        members[: sum(counts)] = [row for prefix in prefixes for row in prefix.rows]
        ends = np.array([prefix.tokens for prefix in prefixes], dtype=np.int32).repeat(counts)
        shared[members[: sum(counts)]] = ends
        last[members[: sum(counts)]] = ends - 1
        self._group.plan(np.array(counts), ends - 1, work)

    def cascade(self, slots: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> AttentionStep:
        """Prepare a step of decodes alone, some of which share prefixes, all of it on the device: each prefix is
        attended to in one pass for 16 sequences or so, and each sequence goes on with what is its own. `slots` and
        `positions`: int32 [tokens]; `values` by `plan_cascade`."""
        tokens, cache = len(slots), self._cache
        shared, last, members = values[: 3 * tokens].view(3, tokens)
        state = torch.empty((tokens, self._heads, cache.head_dim), device=self._device)
        sums = torch.empty((tokens, self._heads, 2), device=self._device)
        prefixes = _Shared(self.tables, slots, last, members, values[3 * tokens :], shared, state, sums)
        return replace(self.decode(slots, positions), shared=prefixes)

    def mixed(self, step: StepInput, slots: torch.Tensor, positions: torch.Tensor) -> AttentionStep:
        """Prepare a step of any kind; its prompts need FlashInfer. `slots` and `positions`: int32 [tokens]."""
        decodes = step.singles
        tables = self.tables[slots[:decodes]]
        prompts = self._plan(step, decodes) if decodes < len(step.lengths) else None
        return AttentionStep(self._located(slots, positions)[0], decodes, tables, positions[:decodes], prompts)

    def __call__(
        self, step: AttentionStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend; keys and values are in the cache already. `query` [tokens, heads, head_dim], contiguous; `key` and
        `value` are the step's own, [tokens, kv_heads, head_dim]. Returns [tokens, heads, head_dim].
        """
        out = torch.empty_like(query)
        keys, values = self._layers[layer]
        count = step.decodes
        if step.groups is not None:
            self._group(query, keys, values, self.tables, *step.groups, out)
        cascade = None
        if step.shared is not None:
            tables, slots, last, members, work, tokens, state, sums = step.shared
            self._group.prefixes(query, keys, values, tables, slots, last, members, work, state, sums)
            cascade = tokens, state, sums
        if count:
            self._decode(query[:count], keys, values, step.tables, step.positions, out[:count], cascade, step.count)
        if step.prompts is not None and step.prompts.ragged:
            step.prompts.wrapper.run(query[count:], key[count:], value[count:], out=out[count:])
        elif step.prompts is not None:
            step.prompts.wrapper.run(query[count:], (keys, values), out=out[count:])
        return out

    def _located(
        self, slots: torch.Tensor, positions: torch.Tensor, copy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `locate`."""
        return locate(slots, positions, self.tables, self._cache.block_size, self._stride, copy=copy)

    def _plan(self, step: StepInput, first: int) -> _PromptPlan:
        """Have FlashInfer plan the prompts of a step, its sequences from `first` on; the step before last used the
        same buffers."""
        self._wrappers.reverse()
        ragged, paged = self._wrappers[0]
        cache = self._cache
        starts, lengths, tables = step.starts[first:], step.lengths[first:], step.tables[first:]
        begun = _offsets(lengths)
        common: dict[str, Any] = {"causal": True, "sm_scale": self._scale, "q_data_type": self._dtype}
        if not any(starts):
            ragged.plan(begun, begun, self._heads, cache.heads, cache.head_dim, kv_data_type=self._dtype, **common)
            return _PromptPlan(ragged, True)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        counts = [-(-end // cache.block_size) for end in ends]
        blocks = [block for (table,), count in zip(tables, counts, strict=True) for block in table[:count]]
        last = torch.tensor([(end - 1) % cache.block_size + 1 for end in ends], dtype=torch.int32)
        indices = to_device(blocks, torch.int32, self._device)
        sizes = self._heads, cache.heads, cache.head_dim, cache.block_size
        # FlashInfer takes FlashAttention-3 where it can; over float8 keys with such queries that is its version 2.
        paged.plan(begun, _offsets(counts), indices, last, *sizes, kv_data_type=cache.data.dtype, **common)
        return _PromptPlan(paged, False)


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    """Return where each begins, and the end: int32 [n + 1], on the host."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, out=offsets[1:])
    return offsets
