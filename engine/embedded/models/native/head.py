"""An EAGLE-3 head on a CPU, computed by `decoder.cpp` as a model of one layer."""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import addressof, c_float, c_int32

import numpy as np
import torch
from torch.nn import functional

from engine.checkpoints.eagle import EagleHead
from engine.embedded.models.heads import DraftRounds, HeadDraft, HeadStep, head_rotary, load_tensors
from engine.embedded.models.native.inputs import StepInputs
from engine.embedded.models.native.structures import (
    BLOCK,
    BLOCK_BYTES,
    Kind,
    NativeDrafting,
    NativeLayer,
    NativeMatrix,
    NativeModel,
    NativeStep,
)
from engine.embedded.models.native.weights import zeros
from engine.errors import EngineFailure

_TAIL = 64


class NativeHead:
    """A `HeadRunner`: panels of 8 bits, since drafts need not be exact, the target's embedding, and a KV cache of the
    target's type."""

    rounds: DraftRounds | None = None

    def __init__(
        self, head: EagleHead, code: ctypes.CDLL, embedding: NativeMatrix, output: torch.Tensor,
        cached: torch.dtype, blocks: int, block_size: int, threads: int,
    ) -> None:  # fmt: skip
        """`output`: the target's output rows, for a head without its own. Raises EngineFailure."""
        facts, tensors = head.facts, load_tensors(head)
        self._code = code
        self._hidden = facts.hidden_size
        self._drafted = tensors["d2t"].to(torch.int32).numpy()
        self._kept: list[torch.Tensor] = []
        rows = tensors["lm_head"] if "lm_head" in tensors else output[tensors["d2t"]]
        self._layer = NativeLayer(
            qkv=self._matrix(torch.cat([tensors[f"{name}_proj"] for name in "qkv"])),
            out=self._matrix(tensors["o_proj"]),
            gate_up=self._matrix(tensors["gate_proj"], tensors["up_proj"]),
            down=self._matrix(tensors["down_proj"]),
            attention_norm=self._vector(tensors["input_layernorm"]),
            mlp_norm=self._vector(tensors["post_attention_layernorm"]),
        )
        size = 2 * facts.kv_heads * facts.head_dim * (block_size + block_size % 2)
        self._cache = zeros((blocks * size + _TAIL,), cached)
        self._layer.cache, self._layer.stride = self._cache.data_ptr(), size
        model = NativeModel(
            layers=ctypes.pointer(self._layer),
            embedding=embedding,
            head=self._matrix(rows),
            norm=self._vector(tensors["norm"]),
            num_layers=1,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            block_size=block_size,
            epsilon=facts.number("rms_norm_eps"),
            scale=facts.head_dim**-0.5,
            embedding_scale=1.0,
            hidden_norm=self._vector(tensors["hidden_norm"]),
            norm_before_residual=head.norm_before_residual,
            fc=self._matrix(tensors["fc"]),
        )
        self._inputs = StepInputs([head_rotary(head)], blocks * block_size, len(rows))
        self._decoder = code.decoder_new(model, threads)
        weakref.finalize(self, code.decoder_delete, self._decoder)
        layers = np.ones(1, np.int64)
        code.decoder_take(self._decoder, layers.ctypes.data, 1)  # the output of its one layer

    def draft(self, step: HeadStep, limits: Sequence[int], least: float) -> list[HeadDraft]:
        """See `HeadRunner`."""
        count, sequences, most = len(step.tokens), len(limits), max(max(limits), 1)
        places: list[int] = []
        tables: list[int] = []
        rows: list[int] = []
        following: list[int] = []
        row = 0
        for start, length, table in zip(step.starts, step.lengths, step.tables, strict=True):
            places += (row, length, start, len(tables), len(table))
            tables += table
            row += length
            rows.append(row - 1)
            last = step.positions[row - 1]
            following += range(last + 1, last + 1 + most)
        cos, sin, turns, num_turns = self._inputs.turns([*step.positions, *following])
        written, *others, turns_behind = self._inputs.write(
            step.tokens, turns[:count], places, tables, rows, turns[count:]
        )
        inputs, hidden = step.inputs.contiguous(), torch.empty(count, self._hidden)
        logits = self._inputs.logits(sequences)
        lengths = (c_int32 * sequences)(*limits)
        tokens, probabilities = (c_int32 * (sequences * most))(), (c_float * (sequences * most))()
        self._code.decoder_draft(
            self._decoder,
            NativeStep(
                written, None, cos, sin, *others, logits.data_ptr(),
                inputs.data_ptr(), hidden.data_ptr(), count, sequences, sequences, num_turns,
            ),
            NativeDrafting(
                self._drafted.ctypes.data, turns_behind,
                addressof(lengths), addressof(tokens), addressof(probabilities), most, least,
            ),
        )  # fmt: skip
        return [
            HeadDraft(tokens[first : first + length], probabilities[first : first + length])
            for first, length in zip(range(0, sequences * most, most), lengths, strict=True)
        ]

    def _matrix(self, *weights: torch.Tensor) -> NativeMatrix:
        """Lay out one matrix, or a gate and what it gates, a panel of each in turn."""
        panel = int(self._code.panel_size())
        padded = -(-len(weights[0]) // panel) * panel
        inputs = weights[0].shape[1]
        size = len(weights) * (padded // panel) * int(self._code.panel_bytes(Kind.Q8_0, inputs))
        panels = self._keep(torch.zeros(size, dtype=torch.uint8))
        blocks = -(-inputs // BLOCK)
        for index, weight in enumerate(weights):
            lacking = padded - len(weight) if len(weights) > 1 else 0
            whole = functional.pad(weight.float(), (0, 0, 0, lacking)).contiguous()
            raw = torch.empty((len(whole), blocks * BLOCK_BYTES[Kind.Q8_0]), dtype=torch.uint8)
            if not self._code.quantize(whole.data_ptr(), *whole.shape, raw.data_ptr()):
                raise EngineFailure("the EAGLE-3 head has values that are not finite")
            self._code.pack_blocks(Kind.Q8_0, raw.data_ptr(), len(raw), blocks, panels, index, len(weights))
        outputs = len(weights[0]) if len(weights) == 1 else len(weights) * padded
        return NativeMatrix(panels, None, outputs, inputs, Kind.Q8_0)

    def _vector(self, values: torch.Tensor) -> int:
        return self._keep(values.float().contiguous())

    def _keep(self, values: torch.Tensor) -> int:
        self._kept.append(values)
        return values.data_ptr()
