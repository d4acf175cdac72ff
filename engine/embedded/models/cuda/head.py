"""An EAGLE-3 head on a GPU: the decoder's kernels, a CUDA graph for reading, and one for each further token of drafts.

What follows a token is found on the device, so the host waits once for several of them. A sequence's positions are
computed side by side, each as a decode would be: mostly there are a few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain as concatenated
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from engine.checkpoints.eagle import EagleHead
from engine.embedded.kv.cache import KvCache
from engine.embedded.models.cuda import head_kernels, kernels
from engine.embedded.models.cuda.compiling import compile_first, expect_compilation, warn_of_compilation
from engine.embedded.models.cuda.decode_attention import DecodeAttention
from engine.embedded.models.cuda.decoder import logits_of, rotations
from engine.embedded.models.cuda.graphs import capture
from engine.embedded.models.cuda.weights import Normed, PlainProducts
from engine.embedded.models.heads import (
    DraftRounds,
    HeadDraft,
    HeadStep,
    head_rotary,
    load_tensors,
    most_read,
    places_of,
)
from engine.kit.collector import uncollected

_AT_ONCE = 4
"""Number of tokens that are drafted before the host looks whether to go on."""
_READ_EACH = 4
"""Number of positions of each sequence up to which a graph reads them."""
_READ_ALONE = 8
"""Number of positions that a graph reads however few sequences there are."""
_MOST_GRAPHED = 512
"""Maximum number of positions that a graph reads."""
_WIDTH = 16
"""Widths of block tables are multiples of this: Triton would compile a kernel for others."""


class CudaHead:
    """A `HeadRunner` for EAGLE-3 heads whose attention heads have a power of two of dimensions."""

    def __init__(
        self, head: EagleHead, embeddings: torch.Tensor, output: torch.Tensor, *, blocks: int, block_size: int,
        positions: int, most_tokens: int, batch: int, graphs: bool,
    ) -> None:  # fmt: skip
        """`embeddings` and `output`: the target's, [vocabulary, hidden]; the latter serves a head without its own.
        Sequences end before `positions`, and their drafts have up to `most_tokens`. Raises EngineFailure."""
        facts, tensors = head.facts, load_tensors(head)
        self._device, self._dtype, self._embeddings = output.device, output.dtype, embeddings
        self._drafted = tensors.pop("d2t").to(self._device)
        self._products = PlainProducts(fetch=False, device=self._device)

        def joined(*names: str) -> torch.Tensor:
            return torch.cat([tensors[name] for name in names]).to(self._device, self._dtype)

        self._fc = joined("fc")
        linears = {"qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",), "down": ("down_proj",)}
        linears["gate_up"] = "gate_proj", "up_proj"
        self._weights = {name: self._products.weight(name, joined(*parts)) for name, parts in linears.items()}
        self._output = joined("lm_head") if "lm_head" in tensors else output[self._drafted]
        epsilon = facts.number("rms_norm_eps")
        self._entry = joined("input_layernorm"), joined("hidden_norm"), epsilon
        self._mlp_norm, self._norm = (joined("post_attention_layernorm"), epsilon), (joined("norm"), epsilon)
        self._norm_before_residual = head.norm_before_residual
        self._rotations = rotations(head_rotary(head), positions + most_tokens, self._device)
        self._heads = facts.heads, facts.kv_heads, facts.head_dim
        self._size, self._spare = block_size, blocks
        shape = blocks + 1, 1, 2, block_size, facts.kv_heads, facts.head_dim
        self._cache = KvCache(torch.zeros(shape, dtype=self._dtype, device=self._device))
        self._attention = DecodeAttention(*self._heads, facts.head_dim**-0.5, self._device)
        self._sizes = _sizes(max(most_read(1), batch * most_read(batch)))
        self.inputs = self._fc.new_zeros((self._sizes[-1], self._fc.shape[1]))
        """The target's hidden states of the positions that are read."""
        width = _width(-(-positions // block_size) + 1, most_tokens, block_size)
        self.chains = [
            Chain(1 << bits, self._sizes[-1], most_tokens, width, blocks, self._fc)
            for bits in range((batch - 1).bit_length() + 1)
        ]
        self.rounds: DraftRounds | None = None
        self.last_draft: object = None
        """The rounds that have drafted last, behind which they may go on; None if `draft` has."""
        self._prepare(graphs)

    @torch.inference_mode()
    def draft(self, step: HeadStep, limits: Sequence[int], least: float) -> list[HeadDraft]:
        """See `HeadRunner`. Tokens behind those that are likely enough may be computed, and are left out."""
        most = max(*limits, 1)
        chain = next(chain for chain in self.chains if chain.size >= len(limits))
        self.last_draft = None
        drafts = [HeadDraft([], []) for _ in limits]
        known, end = 0, min(most, _AT_ONCE)
        self.start(chain, step, end, most)
        while True:
            further = chain.found[known:end].tolist()
            going = [self._extend(draft, further, row, limits[row], least) for row, draft in enumerate(drafts)]
            if end == most or not any(going):
                return drafts
            known, end = end, min(most, end + _AT_ONCE)
            self._go_on(chain, end - known)

    def start(self, chain: Chain, step: HeadStep, count: int, most: int) -> None:
        """Read positions and draft `count` tokens; up to `most` may be drafted that tables have no room for."""
        rows = next(size for size in self._sizes if size >= max(len(step.tokens), chain.size))
        self._begin(chain, rows, step)
        self.set_tables(chain, step.tables, most)
        if (reading := chain.readings.get(rows)) is not None:
            reading.replay()
        else:
            self.read(chain, rows)
        self._go_on(chain, count - 1)

    def set_tables(self, chain: Chain, tables: Sequence[list[int]], most: int) -> None:
        """Have tables on the device, as wide as `most` tokens behind them need."""
        chain.set_tables(tables, _width(max(map(len, tables)), most, self._size))

    def _go_on(self, chain: Chain, count: int) -> None:
        """Draft so many tokens more."""
        for _ in range(count):
            if chain.following is not None:
                chain.following.replay()
            else:
                self.follow(chain)

    @staticmethod
    def _extend(draft: HeadDraft, found: list[list[list[float]]], row: int, limit: int, least: float) -> bool:
        """Add the tokens found for a sequence to its draft, as far as it goes; return whether it goes on."""
        for tokens, probabilities in found:
            if len(draft.tokens) >= limit or (draft.tokens and math.prod(draft.probabilities) <= least):
                return False
            draft.tokens.append(int(tokens[row]))
            draft.probabilities.append(probabilities[row])
        return len(draft.tokens) < limit and math.prod(draft.probabilities) > least

    def _begin(self, chain: Chain, rows: int, step: HeadStep) -> None:
        """Copy to the device what is needed to read `rows` positions, beside tables. Rows that are only there to fill
        up write to the spare block."""
        count, flat = len(step.lengths), len(step.tokens)
        lengths, positions, places = np.array(step.lengths), np.array(step.positions), np.array(places_of(step))
        last = lengths.cumsum() - 1
        inputs = chain.host_inputs[: 4 * (chain.size + rows)]
        inputs.zero_()
        states, read = (part.numpy() for part in parts(inputs, chain.size, rows))
        states[0, :count], states[1, :count], states[3, :count] = positions[last], places[last], last
        read[3] = chain.size  # the table that is spare
        read[0, :flat], read[1, :flat], read[2, :flat] = step.tokens, positions, places
        read[3, :flat] = np.arange(count).repeat(lengths)
        chain.inputs[: len(inputs)].copy_(inputs, non_blocking=True)
        self.inputs[:flat].copy_(step.inputs)

    def read(self, chain: Chain, rows: int) -> None:
        """Read positions, and find the tokens behind the last ones of each sequence."""
        tokens, positions, places, owners = parts(chain.inputs, chain.size, rows)[1]
        hidden = functional.linear(self.inputs[:rows], self._fc)
        self._compute(tokens, hidden, positions, places, chain.tables[owners])
        torch.index_select(hidden, 0, chain.last, out=chain.hidden)
        self._choose(chain)

    def follow(self, chain: Chain) -> None:
        """Find the tokens behind those that were found last."""
        self._compute(chain.tokens, chain.hidden, chain.positions, chain.places, chain.tables[: chain.size])
        self._choose(chain)

    def _choose(self, chain: Chain) -> None:
        """Note the likeliest tokens behind the outputs of the layer."""
        logits = logits_of(chain.hidden, self._norm, self._output)
        head_kernels.choose(
            logits, self._drafted, chain.found, chain.tokens, chain.positions, chain.places, chain.numbers
        )

    def _compute(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, places: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:  # fmt: skip
        """Compute positions: the token that follows each, its hidden states [rows, hidden], which become the output of
        the layer, its place in its sequence's table, and that table, [rows, blocks]; all but the hidden states are
        int32."""
        products, weights = self._products, self._weights
        entered, rows = head_kernels.enter(
            tokens, self._embeddings, hidden, places, tables, self._size, self._entry, self._norm_before_residual
        )
        qkv = products.product(Normed(entered), weights["qkv"])
        keys, values = self._cache.data[:, 0, 0], self._cache.data[:, 0, 1]
        query = kernels.rotate_and_store(qkv, self._heads, self._rotations, positions, rows, keys, values)
        attended = torch.empty_like(query)
        self._attention(query, keys, values, tables, places, attended)
        normed = products.add(hidden, attended.flatten(1), weights["out"], self._mlp_norm)
        products.add_gated(hidden, normed, weights["gate_up"], weights["down"], None)

    @torch.inference_mode()
    def _prepare(self, graphs: bool) -> None:
        """Have the kernels for drafts of any number of sequences, and for any number of positions, compiled and loaded,
        and capture the graphs."""
        read = [(chain, rows) for chain in self.chains for rows in self._sizes if _is_graphed(chain.size, rows)]
        others = [(self.chains[0], rows) for rows in self._sizes if not _is_graphed(1, rows)]

        def compute(parts: Sequence[tuple[Chain, int]], chains: Sequence[Chain]) -> None:
            for chain, rows in parts:
                chain.clear(rows)
                self.read(chain, rows)
            for chain in chains:
                self.follow(chain)

        expect_compilation()
        compile_first(lambda: compute([*read, *others], self.chains))
        if graphs:
            compute(others, [])
            self._capture(read)
        else:
            compute([*read, *others], self.chains)
        self.draft(HeadStep([0], [0], [0], [1], [[self._spare]], self.inputs[:1]), [1], 0.0)  # loads what is left
        warn_of_compilation()

    def _capture(self, read: Sequence[tuple[Chain, int]]) -> None:
        """Capture the graphs that read these numbers of positions, and those that follow."""
        pool: Any = None
        with uncollected():
            for chain, rows in reversed(read):
                chain.clear(rows)
                chain.readings[rows], _ = capture(partial(self.read, chain, rows), pool)
                pool = chain.readings[rows].pool()
            for chain in self.chains:
                chain.clear(0)
                chain.following, _ = capture(partial(self.follow, chain), pool)


class Chain:
    """Drafts of up to `size` sequences, in the memory that graphs read and write."""

    def __init__(self, size: int, most_read: int, most: int, width: int, spare: int, like: torch.Tensor) -> None:
        """Sequences have tables of `width` blocks, and drafts of `most` tokens. `spare`: a block that no sequence has;
        `like`: a weight, [hidden, any]."""
        self.size = size
        self.readings: dict[int, torch.cuda.CUDAGraph] = {}
        """By the number of positions that are read."""
        self.following: torch.cuda.CUDAGraph | None = None
        self.inputs = torch.zeros(4 * (size + most_read), dtype=torch.int32, device=like.device)
        """Numbers that the host copies here before each draft; `parts` says what each of them is."""
        self.positions, self.places, self.numbers, self.last = parts(self.inputs, size, 0)[0]
        """Position of the last token found for each sequence, its place in the table, the number of tokens found, and
        the last row that is read."""
        self.host_inputs = torch.zeros(len(self.inputs), dtype=torch.int32)
        """The same on the host. Nothing reads it any more once a draft is known."""
        self._host_tables = torch.zeros(size * width, dtype=torch.int32)
        if like.is_cuda:
            self.host_inputs, self._host_tables = self.host_inputs.pin_memory(), self._host_tables.pin_memory()
        self.tokens = torch.zeros(size, dtype=torch.int32, device=like.device)
        """The last token found for each sequence."""
        self.hidden = like.new_zeros((size, len(like)))
        """The output of the layer that it was found from."""
        self.tables = torch.full((size + 1, width), spare, dtype=torch.int32, device=like.device)
        """A table for each sequence, and one of spare blocks."""
        self.found = torch.zeros((most, 2, size), device=like.device)
        """Tokens, as floats, and their probabilities: one row after another."""
        self._spare = spare
        self._uploaded: list[int] = []
        """The tables that are there, one behind the other, and their lengths."""
        self._width = 0
        """Width up to which they are."""

    def clear(self, rows: int) -> None:
        """Begin without a sequence, and with so many rows to read that are only there to fill up."""
        self.inputs.zero_()
        parts(self.inputs, self.size, rows)[1][3] = self.size

    def set_tables(self, tables: Sequence[list[int]], width: int) -> None:
        """Have tables on the device up to a width; positions behind their ends are written to the spare block."""
        wanted = [*map(len, tables), *concatenated.from_iterable(tables)]
        if wanted == self._uploaded and width <= self._width:
            return
        packed = self._host_tables[: self.size * width].view(self.size, width)
        values = packed.numpy()
        values[:] = self._spare
        for row, table in zip(values, tables, strict=False):
            row[: len(table)] = table
        self.tables[: self.size, :width].copy_(packed, non_blocking=True)
        self._uploaded, self._width = wanted, width


def parts(inputs: torch.Tensor, size: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two parts of a chain's inputs, of four rows each. The first has a column for each of `size` sequences:
    position, place, number of tokens found, and last row to read. The second has one for each of `rows` positions to
    read: token, position, place, and row of its table."""
    return inputs[: 4 * size].view(4, size), inputs[4 * size : 4 * (size + rows)].view(4, rows)


def _sizes(most: int) -> list[int]:
    """Return the numbers of positions that are read together, padding included: powers of two, and half as much more,
    so that there are kernels for all."""
    sizes = [1, 2, 3]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-2])
    return sizes


def _is_graphed(sequences: int, rows: int) -> bool:
    """Return whether so many rows of so many sequences are read by a graph."""
    return sequences <= rows <= min(max(_READ_EACH * sequences, _READ_ALONE), _MOST_GRAPHED)


def _width(blocks: int, most: int, size: int) -> int:
    """Return the width of a table of so many blocks of a size, and `most` tokens behind them."""
    return -(-(blocks + -(-most // size)) // _WIDTH) * _WIDTH
