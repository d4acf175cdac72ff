"""The native runner: models of the Llama kind on a CPU, computed by `decoder.cpp`. Loads weights itself, without
transformers.

The torch runner (`engine/embedded/models/torch/runner.py`) runs whatever transformers has; this is the fast path for
what it knows: bfloat16 or quantised weights, float32 activations, keys and values in the type of products, a whole step
in one call.
"""

import ctypes
import logging
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from engine.checkpoints.eagle import EagleHead, taken_layers
from engine.checkpoints.headers import some
from engine.config import EmbeddedConfig, Tag
from engine.embedded.kv.layout import share
from engine.embedded.kv.memory import KvMemory, discard, shared_zeros
from engine.embedded.models.checkpoint import LlamaConfig, read_config
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.native.build import NoCompilerError, find_compiler, first_compiled, library
from engine.embedded.models.native.checkpoint import NativeCheckpoint
from engine.embedded.models.native.head import NativeHead
from engine.embedded.models.native.inputs import StepInputs
from engine.embedded.models.native.levels import Arithmetic, chosen
from engine.embedded.models.native.structures import NativeDraw, NativeStep, Way
from engine.embedded.models.native.weights import Weights, zeros
from engine.embedded.models.runner import EmbeddingRows, PendingTokens, StepInput
from engine.embedded.models.shared_weights import SharedWeights
from engine.embedded.sampling.sampler import SPARE, Report, Sampler, uniform
from engine.embedded.sampling.state import SamplerState
from engine.embedded.threads import compute_threads

log = logging.getLogger(__name__)

MIB = 1 << 20
_TAIL = 64
"""Values behind the cache, as many as a panel has: `decoder.cpp` reads whole panels where a block or a head ends
within one."""


_MOST_DRAWING = 8
"""Maximum number of threads that draw tokens: a few rows for each take as long as waking it."""


class NativeRunner(PendingTokens):
    """A `ModelRunner` for models of the Llama kind on a CPU. A sequence's logits are the same to the bit, whatever
    else is in a step."""

    device = torch.device("cpu")
    dtype = torch.float32
    compute_path = "native"

    def __init__(self, config: EmbeddedConfig) -> None:
        super().__init__(config.max_batch_size, self.device)
        _check_settings(config)
        folder, levels = Path(config.model), chosen(config.cpu_isa, config.dtype)
        self._folder, self._shape = folder, (shape := read_config(folder, config.max_seq_len))
        try:
            level = first_compiled(code_folder(config), levels)
            code = library(code_folder(config), level)
        except NoCompilerError as error:
            raise UnsupportedModelError(str(error)) from error
        with NativeCheckpoint(folder, shape) as checkpoint, SharedWeights(config) as self.shared_weights:
            self._weights = Weights(code, checkpoint, shape, self.shared_weights, int8=config.quantization == "int8")
            if checkpoint.unused:
                log.warning("the model does not use all that %s has: %s", folder, some(checkpoint.unused))
        self.instruction_set = level.name
        self.takes_images = shape.takes_images
        self.vocab_size = shape.vocab_size
        self.eos_token_ids = shape.eos_token_ids
        self.context_length = shape.context_length
        cached = torch.float32 if level.products == Arithmetic.FLOATS else torch.bfloat16
        layer_bytes = _layer_bytes(config, shape, cached)
        self.groups = share(
            shape.attends, layer_bytes, config.kv_cache_memory_mb * MIB, config.kv_block_size, config.num_blocks
        )
        blocks = [(group.num_blocks, len(group.layers) * layer_bytes // cached.itemsize) for group in self.groups]
        allocate = shared_zeros if config.kv_transfer else zeros
        self._inputs = StepInputs(shape.rotaries, self.context_length, shape.vocab_size)
        self._caches = [allocate((math.prod(sizes) + _TAIL,), cached) for sizes in blocks]
        caches = [cache[:-_TAIL].view(sizes) for cache, sizes in zip(self._caches, blocks, strict=True)]
        self.memory = KvMemory("blocks of heads", shape.attends, caches)
        self._most_threads = threads = compute_threads(config.threads)
        self.sampler = NativeSampler(shape.vocab_size, code, threads)
        model = self._weights.describe(self.groups, caches, config.kv_block_size)
        self._decoder = code.decoder_new(model, threads)
        self._forward, self._threads = code.decoder_forward, code.decoder_threads
        self._code, self._block_size = code, config.kv_block_size
        self._taken = np.array(taken_layers(config.head_folder, shape.facts), np.int64)
        code.decoder_take(self._decoder, self._taken.ctypes.data, len(self._taken))
        weakref.finalize(self, code.decoder_delete, self._decoder)

    def release_memory(self, tags: Collection[Tag], level: int) -> None:
        if "kv_cache" in tags:
            for cache in self._caches:
                discard(cache)
        if "weights" in tags and level > 1:
            self._weights.discard()

    def resume_memory(self, tags: Collection[Tag]) -> None:
        if "weights" in tags and self._weights.discarded:
            with NativeCheckpoint(self._folder, self._shape) as checkpoint:
                self._weights.fill(checkpoint)

    @property
    def threads(self) -> int:
        """Number of threads that compute: fewer than configured while others occupy their cores."""
        return int(self._threads(self._decoder))

    def forward(self, step: StepInput) -> torch.Tensor:
        tokens = self.token_ids(step)
        places: list[int] = []
        tables: list[int] = []
        row = 0
        for start, length, own in zip(step.starts, step.lengths, step.tables, strict=True):
            blocks = -(-(start + length) // self._block_size)
            places += (row, length, start, len(tables), blocks)
            for table in own:
                tables += table[:blocks]
            row += length
        cos, sin, indices, num_turns = self._inputs.turns(step.positions)
        written, *others = self._inputs.write(tokens, indices, places, tables, step.rows)
        logits = self._inputs.logits(len(step.rows))
        embeddings = None if step.embeddings is None else _addresses(step.embeddings, len(tokens))
        shown = None if embeddings is None else embeddings.ctypes.data
        sizes = len(tokens), len(step.starts), len(step.rows)
        if len(self._taken):
            self.hidden = torch.empty(len(tokens), len(self._taken) * self._shape.hidden)
        hidden = None if self.hidden is None else self.hidden.data_ptr()
        self._forward(
            self._decoder,
            NativeStep(written, shown, cos, sin, *others, logits.data_ptr(), None, hidden, *sizes, num_turns),
        )
        return logits

    def load_head(self, head: EagleHead, spare_blocks: int) -> NativeHead:
        """See `ModelRunner`."""
        with NativeCheckpoint(self._folder, self._shape) as checkpoint:
            own = "lm_head.weight" in checkpoint
            output = checkpoint.tensor("lm_head.weight" if own else "model.embed_tokens.weight")
        blocks = self.groups[0].num_blocks + spare_blocks
        return NativeHead(
            head,
            self._code,
            self._weights.embedding,
            output,
            self._caches[0].dtype,
            blocks,
            self._block_size,
            self._most_threads,
        )


def check(config: EmbeddedConfig) -> bool:
    """Return whether the model certainly runs here, without reading weights or compiling; False if that depends on the
    weights' values.

    Raises UnsupportedModelError.
    """
    _check_settings(config)
    folder = Path(config.model)
    with NativeCheckpoint(folder, read_config(folder, config.max_seq_len)) as checkpoint:
        certain = config.quantization == "int8" or checkpoint.is_bfloat16
    try:
        find_compiler()
    except NoCompilerError as error:
        raise UnsupportedModelError(str(error)) from error
    return certain


def code_folder(config: EmbeddedConfig) -> Path:
    """Return where compiled code is kept."""
    return Path(config.cache_dir or "~/.cache/trellis").expanduser()


def _check_settings(config: EmbeddedConfig) -> None:
    if config.dtype not in ("auto", "float32") or config.load_format == "dummy":
        raise UnsupportedModelError(
            f"dtype {config.dtype} and load format {config.load_format} are not for compiled code"
        )


def _addresses(images: EmbeddingRows, tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.uintp]]":
    """Return for each flat token the address of the embedding that replaces its own, 0 for none."""
    addresses = np.zeros(tokens, np.uintp)
    row_bytes = images.embeddings.shape[1] * images.embeddings.itemsize
    addresses[images.rows] = images.embeddings.data_ptr() + np.arange(len(images.rows)) * row_bytes
    return addresses


def _layer_bytes(config: EmbeddedConfig, shape: LlamaConfig, cached: torch.dtype) -> int:
    """Return the bytes of a block in a layer: keys and values of each head in words of 4 bytes (`cache.h`)."""
    words = -(-config.kv_block_size * cached.itemsize // 4)
    return 2 * shape.kv_heads * shape.head_dim * words * 4


class NativeSampler(Sampler):
    """A `Sampler` that draws the same tokens by compiled code (`sampling.h`), up to the rounding of scaled logits and
    exponentials. Logits are float32 and contiguous."""

    def __init__(self, vocab_size: int, code: ctypes.CDLL, threads: int) -> None:
        super().__init__(vocab_size, torch.device("cpu"))
        self._code = code
        self._team = code.draw_team_new(min(threads, _MOST_DRAWING))
        weakref.finalize(self, code.draw_team_delete, self._team)
        self._tokens = (ctypes.c_int64 * 0)()

    def _choose(self, logits: torch.Tensor, states: Sequence[SamplerState], attempt: int = 0) -> list[int]:
        draws = (NativeDraw * len(states))(*(_describe(state, attempt) for state in states))
        return self._tokens_of(partial(self._code.draw, self._team), logits, draws)

    def _largest(self, logits: torch.Tensor) -> list[int]:
        return self._tokens_of(self._code.largest_ids, logits)

    def _tokens_of(self, function: Callable[..., None], logits: torch.Tensor, *more: object) -> list[int]:
        """Call a function that writes a token for each row."""
        assert logits.dtype == torch.float32 and logits.is_contiguous()
        rows, vocab_size = logits.shape
        if rows > len(self._tokens):
            self._tokens = (ctypes.c_int64 * rows)()
        function(logits.data_ptr(), rows, vocab_size, *more, self._tokens)
        return self._tokens[:rows]

    def _report(
        self, logits: torch.Tensor, tokens: torch.Tensor | list[int], rows: Sequence[int], counts: Sequence[int]
    ) -> Report:
        logits = logits.contiguous()
        listed = min(max(counts) + SPARE, self._vocab_size)
        values = torch.empty((len(logits), 3 + 2 * listed))
        chosen = (ctypes.c_int64 * len(rows))(*(int(tokens[row]) for row in rows))
        self._code.report(self._team, logits.data_ptr(), *logits.shape, chosen, listed, values.data_ptr())
        return Report(values, counts, SPARE)


def _describe(state: SamplerState, attempt: int) -> NativeDraw:
    sampling = state.sampling
    way = Way.LARGEST if state.greedy else Way.QUANTILE if sampling.seed is None else Way.RACE
    quantile = uniform(state.seed, state.position, attempt) if way == Way.QUANTILE else 0.0
    truncation = sampling.temperature, sampling.top_p, sampling.min_p
    # ctypes keeps the low 64 bits of a seed, which are all that count.
    return NativeDraw(state.seed, state.position, sampling.top_k, quantile, *truncation, way)
