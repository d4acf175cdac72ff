"""A checkpoint's weights as `decoder.cpp` reads them: bfloat16 panels, laid out once, in one range of large pages."""

import ctypes
import math
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional

from engine.embedded.models.native.checkpoint import Checkpoint, LlamaConfig
from engine.embedded.models.native.structures import NativeLayer, NativeMatrix, NativeModel
from engine.embedded.threads import compute_threads
from engine.errors import EngineFailure


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate anonymous pages, which take memory only once they are written; large ones where the system has them."""
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class Weights:
    """All panels and norms of a model, and the structures that point to them. Raises EngineFailure for a value that is
    not finite."""

    def __init__(self, code: ctypes.CDLL, checkpoint: Checkpoint, config: LlamaConfig) -> None:
        self._code = code
        self._checkpoint = checkpoint
        self._config = config
        self._shapes = config.shapes
        self._panel: int = code.panel_size()
        self._kept: list[torch.Tensor] = []
        self._work: list[Callable[[], None]] = []
        tied = "lm_head.weight" not in checkpoint
        vectors = config.heads + 2 * config.kv_heads
        matrices = (1 if tied else 2) * self._words(config.vocab_size, config.hidden) + config.layers * (
            self._words(vectors * config.head_dim, config.hidden)
            + self._words(config.hidden, config.heads * config.head_dim)
            + 2 * self._words(config.intermediate, config.hidden)
            + self._words(config.hidden, config.intermediate)
        )
        self._arena = zeros((matrices,), torch.int32)
        self._used = 0
        self.layers = (NativeLayer * config.layers)(
            *(self._layer(f"model.layers.{index}.") for index in range(config.layers))
        )
        self.embedding = self._matrix(["model.embed_tokens"])
        self.head = self.embedding if tied else self._matrix(["lm_head"])
        self.norm = self._vector("model.norm.weight")
        with ThreadPoolExecutor(compute_threads()) as pool:
            for done in [pool.submit(work) for work in self._work]:
                done.result()
        self._work.clear()

    def describe(self, cache: torch.Tensor, block_size: int) -> NativeModel:
        """Return the whole model for the compiled code; valid while this and `cache` live."""
        config = self._config
        return NativeModel(
            layers=self.layers,
            embedding=self.embedding,
            head=self.head,
            norm=self.norm,
            cache=cache.data_ptr(),
            num_layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            epsilon=config.epsilon,
            scale=config.head_dim**-0.5,
        )

    def _layer(self, prefix: str) -> NativeLayer:
        return NativeLayer(
            qkv=self._matrix([f"{prefix}self_attn.{name}_proj" for name in "qkv"]),
            out=self._matrix([f"{prefix}self_attn.o_proj"]),
            gate_up=self._matrix([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], interleaved=True),
            down=self._matrix([f"{prefix}mlp.down_proj"]),
            attention_norm=self._vector(f"{prefix}input_layernorm.weight"),
            mlp_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
        )

    def _matrix(self, names: list[str], *, interleaved: bool = False) -> NativeMatrix:
        """Join linears of one input, one below the other or a panel of each in turn; `_work` fills them later.

        Interleaved linears are padded to whole panels with zeros, which count as outputs.
        """
        weights = [self._checkpoint.weight(f"{name}.weight") for name in names]
        sizes, inputs = [len(weight) for weight in weights], weights[0].shape[1]
        outputs = sum(map(self._padded, sizes)) if interleaved else sum(sizes)
        start = self._arena.data_ptr() + self._used * 4
        self._used += self._words(outputs, inputs)
        if not interleaved and any(size % self._panel for size in sizes[:-1]):  # several in one panel
            self._work.append(self._packing(names, weights, start, 0, 1))
            return NativeMatrix(start, self._bias(names), outputs, inputs)
        first = 0
        for index, weight in enumerate(weights):
            place, step = (index, len(weights)) if interleaved else (first, 1)
            self._work.append(self._packing([names[index]], [weight], start, place, step))
            first += self._padded(len(weight)) // self._panel
        return NativeMatrix(start, self._bias(names), outputs, inputs)

    def _packing(
        self, names: list[str], weights: list[torch.Tensor], start: int, first: int, step: int
    ) -> Callable[[], None]:
        def pack() -> None:
            for name, weight in zip(names, weights, strict=True):
                if not self._code.all_finite(weight.data_ptr(), weight.numel()):
                    raise self._not_finite(f"{name}.weight")
            whole = weights[0] if len(weights) == 1 else torch.cat(weights)
            self._code.pack(whole.data_ptr(), *whole.shape, start, first, step)

        return pack

    def _bias(self, names: list[str]) -> int | None:
        """Return the bias in whole panels, zero beyond the outputs."""
        if not all(f"{name}.bias" in self._shapes for name in names):
            return None
        bias = torch.cat([self._floats(f"{name}.bias") for name in names])
        return self._keep(functional.pad(bias, (0, self._padded(len(bias)) - len(bias))))

    def _vector(self, name: str) -> int:
        return self._keep(self._floats(name))

    def _floats(self, name: str) -> torch.Tensor:
        values = self._checkpoint.floats(name)
        if not values.isfinite().all():
            raise self._not_finite(name)
        return values

    def _not_finite(self, name: str) -> EngineFailure:
        return EngineFailure(f"{self._checkpoint.place(name)} has values that are not finite")

    def _keep(self, values: torch.Tensor) -> int:
        self._kept.append(values)
        return values.data_ptr()

    def _words(self, outputs: int, inputs: int) -> int:
        """Return the number of 32-bit words of a matrix's panels."""
        return self._padded(outputs) * inputs // 2

    def _padded(self, size: int) -> int:
        """Round up to a multiple of a panel."""
        return -(-size // self._panel) * self._panel
