"""An EAGLE-3 head on a GPU: the decoder's kernels, and a CUDA graph for each further token of drafts.

What follows a token is found on the device, so the host waits once for several of them. A sequence's positions are
computed side by side, each as a decode would be: mostly there are a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from engine.checkpoints.eagle import EagleHead
from engine.embedded.kv.cache import KvCache
from engine.embedded.models.cuda import kernels
from engine.embedded.models.cuda.compiling import compile_first, expect_compilation, warn_of_compilation
from engine.embedded.models.cuda.decode_attention import DecodeAttention
from engine.embedded.models.cuda.decoder import rotations
from engine.embedded.models.cuda.graphs import capture
from engine.embedded.models.devices import to_device
from engine.embedded.models.heads import HeadDraft, HeadStep, head_rotary, load_tensors, places_of
from engine.kit.collector import uncollected

_AT_ONCE = 4
"""Number of tokens that are drafted before the host looks whether to go on."""
_MOST_READ = 512
"""Number of positions up to which kernels are compiled in advance."""
_WIDTH = 16
"""Widths of block tables are multiples of this: Triton would compile a kernel for others."""


class CudaHead:
    """A `HeadRunner` for EAGLE-3 heads whose attention heads have a power of two of dimensions."""

    def __init__(
        self, head: EagleHead, embed: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor, *, blocks: int,
        block_size: int, positions: int, most_tokens: int, batch: int, graphs: bool,
    ) -> None:  # fmt: skip
        """`embed` returns the target's embeddings of token ids; `output` has its output rows, for a head without its
        own. Sequences end before `positions`, and their drafts have up to `most_tokens`. Raises EngineFailure."""
        facts, tensors = head.facts, load_tensors(head)
        self._device, self._dtype, self._embed = output.device, output.dtype, embed
        self._drafted = tensors.pop("d2t").to(self._device)

        def joined(*names: str) -> torch.Tensor:
            return torch.cat([tensors[name] for name in names]).to(self._device, self._dtype)

        self._fc, self._out, self._down = joined("fc"), joined("o_proj"), joined("down_proj")
        self._qkv, self._gate_up = joined("q_proj", "k_proj", "v_proj"), joined("gate_proj", "up_proj")
        self._output = joined("lm_head") if "lm_head" in tensors else output[self._drafted]
        norms = "input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"
        self._norms = {name: (joined(name), facts.number("rms_norm_eps")) for name in norms}
        self._norm_before_residual = head.norm_before_residual
        self._rotations = rotations(head_rotary(head), positions + most_tokens, self._device)
        self._heads = facts.heads, facts.kv_heads, facts.head_dim
        self._size, self._spare = block_size, blocks
        shape = blocks + 1, 1, 2, block_size, facts.kv_heads, facts.head_dim
        self._cache = KvCache(torch.zeros(shape, dtype=self._dtype, device=self._device))
        self._attention = DecodeAttention(*self._heads, facts.head_dim**-0.5, self._device)
        sizes = [1 << bits for bits in range((batch - 1).bit_length() + 1)]
        self._chains = [_Chain(size, positions, most_tokens, block_size, blocks, self._fc) for size in sizes]
        expect_compilation()
        warm_up = partial(self._warm_up, min(most_tokens, 2), min(positions, _MOST_READ))
        compile_first(warm_up)
        warm_up()
        pool: Any = None
        for chain in reversed(self._chains if graphs else []):
            with torch.inference_mode(), uncollected():
                chain.begin()
                chain.graph, _ = capture(partial(self._follow, chain), pool)
            pool = chain.graph.pool()
        warn_of_compilation()

    @torch.inference_mode()
    def draft(self, step: HeadStep, limits: Sequence[int], least: float) -> list[HeadDraft]:
        """See `HeadRunner`. Tokens behind those that are likely enough may be computed, and are left out."""
        count, most = len(limits), max(*limits, 1)
        chain = next(chain for chain in self._chains if chain.size >= count)
        owners = np.arange(count).repeat(step.lengths)
        last = np.cumsum(step.lengths) - 1
        positions, places = np.array(step.positions), np.array(places_of(step))
        width = chain.begin(positions[last] + 1, places[last] + 1, step.tables, most)
        packed = to_device(np.stack((step.tokens, positions, places, owners)), torch.int32, self._device)
        hidden = functional.linear(step.inputs.to(self._dtype), self._fc)
        tables = chain.tables[:, :width].index_select(0, packed[3])
        found = self._compute(packed[0], hidden, packed[1], packed[2], tables)
        self._choose(chain, found.index_select(0, to_device(last, torch.int64, self._device)), count)
        drafts = [HeadDraft([], []) for _ in limits]
        known, end = 0, min(most, _AT_ONCE)
        while known < end:
            for _ in range(max(known, 1), end):
                if chain.graph is not None:
                    chain.graph.replay()
                else:
                    self._follow(chain)
            further = chain.found[known:end].tolist()
            going = [self._extend(drafts[row], further, row, limits[row], least) for row in range(count)]
            known, end = end, min(most, end + _AT_ONCE) if any(going) else end
        return drafts

    @staticmethod
    def _extend(draft: HeadDraft, found: list[list[list[float]]], row: int, limit: int, least: float) -> bool:
        """Add the tokens found for a sequence to its draft, as far as it goes; return whether it goes on."""
        for tokens, probabilities in found:
            if len(draft.tokens) >= limit or (draft.tokens and math.prod(draft.probabilities) <= least):
                return False
            draft.tokens.append(int(tokens[row]))
            draft.probabilities.append(probabilities[row])
        return len(draft.tokens) < limit and math.prod(draft.probabilities) > least

    def _follow(self, chain: _Chain) -> None:
        """Find the tokens behind those that were found last."""
        found = self._compute(chain.tokens, chain.hidden, chain.positions, chain.places, chain.tables)
        self._choose(chain, found, chain.size)
        chain.positions.add_(1)
        chain.places.add_(1)

    def _choose(self, chain: _Chain, hidden: torch.Tensor, count: int) -> None:
        """Note the likeliest tokens behind these outputs of the layer, [count, hidden]."""
        logits = functional.linear(kernels.rms_norm(hidden, *self._norms["norm"]), self._output)
        probabilities, places = logits.float().softmax(-1).max(-1)
        tokens = self._drafted[places]
        chain.hidden[:count] = hidden
        chain.tokens[:count] = tokens
        chain.row[0, :, :count] = torch.stack((tokens.float(), probabilities))
        chain.found.index_copy_(0, chain.number, chain.row)
        chain.number.add_(1)

    def _compute(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, places: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Compute positions: the token that follows each, int [rows], its hidden states [rows, hidden], its place in
        its sequence's table, and that table, int32 [rows, blocks]. Return the output of the layer."""
        normed = kernels.rms_norm(hidden, *self._norms["hidden_norm"])
        x = normed if self._norm_before_residual else hidden
        embedded = kernels.rms_norm(self._embed(tokens.long()), *self._norms["input_layernorm"])
        qkv = functional.linear(torch.cat((embedded, normed), -1), self._qkv)
        blocks = tables.gather(1, (places // self._size).long()[:, None])[:, 0].long()
        rows = blocks * (2 * self._size) + places % self._size
        keys, values = self._cache.data[:, 0, 0], self._cache.data[:, 0, 1]
        query = kernels.rotate_and_store(qkv, self._heads, self._rotations, positions, rows, keys, values)
        attended = torch.empty_like(query)
        self._attention(query, keys, values, tables, places, attended)
        x = x + functional.linear(attended.flatten(1), self._out)
        gate_up = functional.linear(kernels.rms_norm(x, *self._norms["post_attention_layernorm"]), self._gate_up)
        return x + functional.linear(kernels.silu_mul(gate_up), self._down)

    def _warm_up(self, tokens: int, positions: int) -> None:
        """Have the kernels for drafts of any number of sequences, and for up to so many positions of one, compiled and
        loaded."""
        inputs = torch.zeros((1, self._fc.shape[1]), dtype=self._dtype, device=self._device)
        for size in (chain.size for chain in self._chains):
            flat, ones = [0] * size, [1] * size
            step = HeadStep(flat, flat, flat, ones, [[self._spare]] * size, inputs.expand(size, -1))
            self.draft(step, [tokens] * size, 0.0)
        for count in (count for bits in range(positions.bit_length()) for count in (2 << bits, 3 << bits)):
            if count > positions:
                break
            blocks = [self._spare] * -(-count // self._size)
            step = HeadStep([0] * count, [0] * count, [0], [count], [blocks], inputs.expand(count, -1))
            self.draft(step, [1], 0.0)


class _Chain:
    """Drafts of up to `size` sequences, in the memory that a graph reads and writes."""

    def __init__(self, size: int, positions: int, most: int, block_size: int, spare: int, like: torch.Tensor) -> None:
        """Sequences end before `positions`, and have drafts of `most` tokens. `spare`: a block that no sequence has;
        `like`: a weight, [hidden, any]."""
        device = like.device
        self.size = size
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        """The last token found for each sequence."""
        self.hidden = like.new_zeros((size, len(like)))
        """The output of the layer that it was found from."""
        self.positions, self.places = torch.zeros((2, size), dtype=torch.int32, device=device)
        """Position of that token, and its place in the table."""
        self._block_size, self._spare = block_size, spare
        width = self._width(-(-positions // block_size) + 1, most)
        self.tables = torch.full((size, width), spare, dtype=torch.int32, device=device)
        self.found = torch.zeros((most, 2, size), device=device)
        """Tokens, as floats, and their probabilities: one row after another."""
        self.row = torch.zeros((1, 2, size), device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        """Number of rows found."""

    def begin(self, positions: Any = (), places: Any = (), tables: Sequence[list[int]] = (), most: int = 0) -> int:
        """Begin drafts of `most` tokens at these positions and places of the sequences' tables; return the width of
        tables up to which they matter. Positions behind a table, and rows without a sequence, are written to the spare
        block."""
        width = self._width(max(map(len, tables), default=1), most)
        packed = np.zeros((self.size, 2 + width), dtype=np.int32)
        packed[:, 2:] = self._spare
        packed[: len(positions), 0] = positions
        packed[: len(places), 1] = places
        for row, table in zip(packed, tables, strict=False):
            row[2 : 2 + len(table)] = table
        given = to_device(packed, torch.int32, self.tables.device)
        self.positions.copy_(given[:, 0])
        self.places.copy_(given[:, 1])
        self.tables[:, :width].copy_(given[:, 2:])
        self.number.zero_()
        return width

    def _width(self, blocks: int, most: int) -> int:
        """Return the width of a table of so many blocks, and `most` tokens behind them."""
        return -(-(blocks + -(-most // self._block_size)) // _WIDTH) * _WIDTH
