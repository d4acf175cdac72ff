"""A checkpoint's weights as `decoder.cpp` reads them: panels of bfloat16 or of quantised blocks, laid out once, in one
range of large pages."""

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import starmap
from pathlib import Path

import torch
from torch.nn import functional

from engine.embedded.kv.layout import LayerGroup
from engine.embedded.kv.memory import discard
from engine.embedded.models.checkpoint import LlamaConfig
from engine.embedded.models.native.checkpoint import NativeCheckpoint
from engine.embedded.models.native.structures import BLOCK, BLOCK_BYTES, Kind, NativeLayer, NativeMatrix, NativeModel
from engine.embedded.models.shared_weights import SharedWeights
from engine.embedded.threads import compute_threads
from engine.errors import EngineFailure

_ROWS = 4096
"""Rows that are widened to float32 at a time."""
_NORMS = {"attention_norm": "input", "mlp_norm": "post_attention"}
"""Norms of a layer in a checkpoint, by the field of `NativeLayer`."""
_GEMMA_NORMS = {
    "attention_norm": "input",
    "attended_norm": "post_attention",
    "mlp_norm": "pre_feedforward",
    "computed_norm": "post_feedforward",
}


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

    def __init__(
        self,
        code: ctypes.CDLL,
        checkpoint: NativeCheckpoint,
        config: LlamaConfig,
        shared: SharedWeights,
        *,
        int8: bool = False,
    ) -> None:
        """`int8` quantises matrices to 8 bits, unless they are stored as blocks of 8 or 4 bits. Panels are memory of
        `shared` if it has some, which may be filled already."""
        self._code = code
        self._checkpoint = checkpoint
        self._config = config
        self._int8 = int8
        self._shapes = config.shapes
        self._shapes.setdefault("lm_head.weight", self._shapes["model.embed_tokens.weight"])
        self._panel: int = code.panel_size()
        self._kept: list[torch.Tensor] = []
        self._work: list[Callable[[], None]] = []
        layers = [_joined(f"model.layers.{index}.") for index in range(config.layers)]
        embedding, head = ["model.embed_tokens"], ["lm_head"]
        tied = "lm_head.weight" not in checkpoint
        matrices = [embedding, *([] if tied else [head]), *(names for layer in layers for names in layer.values())]
        size, kinds = sum(map(self._bytes, matrices)), [self._kind(names) for names in matrices]
        self._pages = shared.pages(
            size, torch.device("cpu"), Path(code._name).name, kinds, checkpoint.source if int8 else ""
        )
        """The panels, if they are in memory of the service; else they are in `_own`."""
        self._own = None
        if self._pages is None:
            self._own = zeros((size,), torch.uint8)
            self._next = self._own.data_ptr()
        else:
            self._next = self._pages.address
        self.layers = (NativeLayer * config.layers)(*starmap(self._layer, enumerate(layers)))
        self.embedding = self._matrix(embedding)
        self.head = self.embedding if tied else self._matrix(head)
        self.norm = self._vector("model.norm.weight")
        self.discarded = False
        """Whether the panels have to be filled again."""
        self._checked = False
        """Whether all values are known to be finite."""
        if self._pages is None or not self._pages.filled:
            self.fill(checkpoint)

    def fill(self, checkpoint: NativeCheckpoint) -> None:
        """Fill the panels from a checkpoint: that which this was made of, or the same opened again."""
        self._checkpoint = checkpoint
        with ThreadPoolExecutor(compute_threads()) as pool:
            for done in [pool.submit(work) for work in self._work]:
                done.result()
        self.discarded = False
        self._checked = True

    def discard(self) -> None:
        """Give the memory of the panels back until `fill`, unless it belongs to the memory service. Norms and biases,
        which are small, stay."""
        if self._own is not None:
            discard(self._own)
            self.discarded = True

    def describe(self, groups: Sequence[LayerGroup], caches: Sequence[torch.Tensor], block_size: int) -> NativeModel:
        """Return the whole model for the compiled code; valid while this and the caches live, [blocks, values] each."""
        config = self._config
        for number, (group, cache) in enumerate(zip(groups, caches, strict=True)):
            block = cache[0].numel()
            for place, index in enumerate(group.layers):
                layer = self.layers[index]
                layer.cache = cache.data_ptr() + place * block // len(group.layers) * cache.itemsize
                layer.stride, layer.group, layer.window = block, number, group.window or 0
                layer.rotation = len(config.rotaries) > 1 and config.sliding[index]
        return NativeModel(
            layers=self.layers,
            embedding=self.embedding,
            head=self.head,
            norm=self.norm,
            num_layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            gelu=config.gemma,
            epsilon=config.epsilon,
            scale=config.scale,
            embedding_scale=config.hidden**0.5 if config.gemma else 1.0,
        )

    def _layer(self, index: int, joined: dict[str, list[str]]) -> NativeLayer:
        prefix, norms = f"model.layers.{index}.", _GEMMA_NORMS if self._config.gemma else _NORMS
        return NativeLayer(
            **{field: self._matrix(names) for field, names in joined.items()},
            **{field: self._vector(f"{prefix}{name}_layernorm.weight") for field, name in norms.items()},
            query_norm=self._optional_vector(f"{prefix}self_attn.q_norm.weight"),
            key_norm=self._optional_vector(f"{prefix}self_attn.k_norm.weight"),
        )

    def _matrix(self, names: list[str]) -> NativeMatrix:
        """Join linears of one input, one below the other or, if the first is a gate, a panel of each in turn; `_work`
        fills them later."""
        interleaved = _interleaved(names)
        sizes, inputs = [self._shapes[f"{name}.weight"][0] for name in names], self._shapes[f"{names[0]}.weight"][1]
        start, kind = self._next, self._kind(names)
        self._next += self._bytes(names)
        if not interleaved and any(size % self._panel for size in sizes[:-1]):  # several in one panel
            self._work.append(partial(self._pack, kind, names, start, 0, 1))
        else:
            first = 0
            for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
                place, step = (index, len(names)) if interleaved else (first, 1)
                self._work.append(partial(self._pack, kind, [name], start, place, step))
                first += self._padded(size) // self._panel
        return NativeMatrix(start, self._bias(names), self._outputs(names), inputs, kind)

    def _kind(self, names: list[str]) -> Kind:
        """Return how joined linears are computed: as they are stored if that is the same for all."""
        if not self._int8:
            return Kind.BFLOAT16
        stored = {self._checkpoint.block_kind(f"{name}.weight") for name in names}
        kind = stored.pop()
        return Kind.Q8_0 if stored or kind is None else kind

    def _pack(self, kind: Kind, names: list[str], start: int, first: int, step: int) -> None:
        """Write matrices into panels from `first` on, `step` apart, of those that begin at the address `start`."""
        rows = [self._bfloat16(name) if kind == Kind.BFLOAT16 else self._blocks(kind, name) for name in names]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        if kind == Kind.BFLOAT16:
            self._code.pack(whole.data_ptr(), *whole.shape, start, first, step)
        else:
            blocks = whole.shape[1] // BLOCK_BYTES[kind]
            self._code.pack_blocks(kind, whole.data_ptr(), len(whole), blocks, start, first, step)

    def _bfloat16(self, name: str) -> torch.Tensor:
        weight = self._checkpoint.weight(f"{name}.weight")
        if not self._checked and not self._code.all_finite(weight.data_ptr(), weight.numel()):
            raise self._not_finite(f"{name}.weight")
        return weight

    def _blocks(self, kind: Kind, name: str) -> torch.Tensor:
        """Return a matrix as rows of blocks: those stored, or else quantised here to Q8_0."""
        if self._checkpoint.block_kind(f"{name}.weight") == kind:
            return self._checkpoint.blocks(f"{name}.weight")
        weight = self._checkpoint.tensor(f"{name}.weight")
        outputs, inputs = weight.shape
        raw = torch.empty((outputs, -(-inputs // BLOCK) * BLOCK_BYTES[Kind.Q8_0]), dtype=torch.uint8)
        for first in range(0, outputs, _ROWS):
            some = weight[first : first + _ROWS].float().contiguous()
            if not self._code.quantize(some.data_ptr(), *some.shape, raw[first:].data_ptr()):
                raise self._not_finite(f"{name}.weight")
        return raw

    def _bias(self, names: list[str]) -> int | None:
        """Return the bias in whole panels, zero beyond the outputs."""
        if not all(f"{name}.bias" in self._shapes for name in names):
            return None
        bias = torch.cat([self._floats(f"{name}.bias") for name in names])
        return self._keep(functional.pad(bias, (0, self._padded(len(bias)) - len(bias))))

    def _vector(self, name: str) -> int:
        """Keep the weights of a norm; Gemma's count from one."""
        weights = self._floats(name)
        return self._keep(weights + 1.0 if self._config.gemma else weights)

    def _optional_vector(self, name: str) -> int | None:
        return self._vector(name) if name in self._shapes else None

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

    def _bytes(self, names: list[str]) -> int:
        """Return the size of the panels of joined linears."""
        panels = self._padded(self._outputs(names)) // self._panel
        return panels * int(self._code.panel_bytes(self._kind(names), self._shapes[f"{names[0]}.weight"][1]))

    def _outputs(self, names: list[str]) -> int:
        """Return the outputs of joined linears; interleaved ones are padded to whole panels with zeros, which count."""
        sizes = [self._shapes[f"{name}.weight"][0] for name in names]
        return sum(map(self._padded, sizes)) if _interleaved(names) else sum(sizes)

    def _padded(self, size: int) -> int:
        """Round up to a multiple of a panel."""
        return -(-size // self._panel) * self._panel


def _joined(prefix: str) -> dict[str, list[str]]:
    """Return the linears of a layer that are computed as one product, by the field of `NativeLayer`."""
    return {
        "qkv": [f"{prefix}self_attn.{name}_proj" for name in "qkv"],
        "out": [f"{prefix}self_attn.o_proj"],
        "gate_up": [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"],
        "down": [f"{prefix}mlp.down_proj"],
    }


def _interleaved(names: list[str]) -> bool:
    return names[0].endswith("gate_proj")
