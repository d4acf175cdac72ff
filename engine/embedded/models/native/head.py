"""An EAGLE-3 head on a CPU, computed by `decoder.cpp` as a model of one layer."""

import ctypes
import weakref
from itertools import accumulate

import numpy as np
import torch
from torch.nn import functional

from engine.checkpoints.eagle import EagleHead
from engine.embedded.models.heads import HeadOutput, HeadStep, load_tensors
from engine.embedded.models.native.rotary import frequencies
from engine.embedded.models.native.structures import (
    BLOCK,
    BLOCK_BYTES,
    Kind,
    NativeLayer,
    NativeMatrix,
    NativeModel,
    NativeStep,
)
from engine.embedded.models.native.weights import zeros
from engine.errors import EngineFailure

_TAIL = 64


class NativeHead:
    """A `HeadRunner`: panels of 8 bits, since drafts need not be exact, the target's embedding, and a KV cache of
    float32."""

    def __init__(
        self, head: EagleHead, code: ctypes.CDLL, embedding: NativeMatrix, output: torch.Tensor, blocks: int,
        block_size: int, threads: int,
    ) -> None:  # fmt: skip
        """`output`: the target's output rows, for a head without its own. Raises EngineFailure."""
        facts, tensors = head.facts, load_tensors(head)
        rotary = frequencies(facts)
        if rotary is None:
            raise EngineFailure(f"the scaled rotary positions in {head.folder} are unknown")
        self._code, self._frequencies = code, rotary.numpy()
        self._hidden, self._drafted = facts.hidden_size, tensors["d2t"]
        self._kept: list[torch.Tensor] = []
        rows = tensors["lm_head"] if "lm_head" in tensors else output[self._drafted]
        self._layer = NativeLayer(
            qkv=self._matrix(torch.cat([tensors[f"{name}_proj"] for name in "qkv"])),
            out=self._matrix(tensors["o_proj"]),
            gate_up=self._matrix(tensors["gate_proj"], tensors["up_proj"]),
            down=self._matrix(tensors["down_proj"]),
            attention_norm=self._vector(tensors["input_layernorm"]),
            mlp_norm=self._vector(tensors["post_attention_layernorm"]),
        )
        size = 2 * facts.kv_heads * facts.head_dim * block_size
        self._cache = zeros((blocks * size + _TAIL,), torch.float32)
        model = NativeModel(
            layers=ctypes.pointer(self._layer),
            embedding=embedding,
            head=self._matrix(rows),
            norm=self._vector(tensors["norm"]),
            cache=self._cache.data_ptr(),
            num_layers=1,
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            block_size=block_size,
            epsilon=facts.number("rms_norm_eps"),
            scale=facts.head_dim**-0.5,
            hidden_norm=self._vector(tensors["hidden_norm"]),
            norm_before_residual=head.norm_before_residual,
            fc=self._matrix(tensors["fc"]),
        )
        self._decoder = code.decoder_new(model, threads)
        weakref.finalize(self, code.decoder_delete, self._decoder)
        layers = np.ones(1, np.int64)
        code.decoder_take(self._decoder, layers.ctypes.data, 1)  # the output of its one layer

    def forward(self, step: HeadStep) -> HeadOutput:
        """See `HeadRunner`."""
        count, sequences = len(step.tokens), len(step.lengths)
        angles = np.array(step.positions, np.float32)[:, None] * self._frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        ends = list(accumulate(step.lengths))
        tables = list(accumulate((len(table) for table in step.tables), initial=0))
        places = [
            (end - length, length, start, table)
            for end, length, start, table in zip(ends, step.lengths, step.starts, tables, strict=False)
        ]
        rows = [end - 1 for end in ends]
        arrays = [
            np.array(values, np.int32)
            for values in (step.tokens, places, [block for table in step.tables for block in table], rows)
        ]
        inputs = step.inputs.contiguous()
        addresses = inputs.data_ptr() + np.arange(count, dtype=np.uintp) * np.uintp(4 * self._hidden)
        logits = torch.empty(sequences, len(self._drafted))
        hidden = torch.empty(count, self._hidden)
        self._code.decoder_forward(
            self._decoder,
            NativeStep(
                arrays[0].ctypes.data, addresses.ctypes.data if step.own else None, cos.ctypes.data, sin.ctypes.data,
                *(array.ctypes.data for array in arrays[1:]), logits.data_ptr(),
                None if step.own else inputs.data_ptr(), hidden.data_ptr(), count, sequences, sequences,
            ),
        )  # fmt: skip
        values = logits.numpy()  # by numpy: torch would start threads
        best = values.argmax(1)
        highest = values[np.arange(sequences), best]
        sums = np.exp(values - highest[:, None]).sum(1)
        return HeadOutput(self._drafted[torch.from_numpy(best)].tolist(), (1 / sums).tolist(), hidden[rows])

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
