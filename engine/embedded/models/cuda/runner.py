"""The CUDA runner: inputs in one copy, steps of few tokens as CUDA graphs, others eagerly. Nothing here waits for
the device."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoints.eagle import EagleHead
from engine.checkpoints.headers import some
from engine.config import EmbeddedConfig, Tag
from engine.embedded.kv.layout import Attends
from engine.embedded.models.checkpoint import Checkpoint, LlamaConfig, read_config
from engine.embedded.models.cuda.attention import AttentionStep, CudaAttention
from engine.embedded.models.cuda.compiling import (
    compile_first,
    expect_compilation,
    is_bare,
    warn_of_compilation,
)
from engine.embedded.models.cuda.decoder import LlamaDecoder, check_kind, trial
from engine.embedded.models.cuda.flashinfer_kernels import FlashInferKernels
from engine.embedded.models.cuda.graph_sizes import GraphSizes
from engine.embedded.models.cuda.graphs import capture
from engine.embedded.models.cuda.head import CudaHead
from engine.embedded.models.cuda.releasable import ReleasableWeights
from engine.embedded.models.cuda.rounds import CudaRounds
from engine.embedded.models.cuda.sampler import CudaSampler, RowDraws
from engine.embedded.models.cuda.step_kernels import embed
from engine.embedded.models.devices import (
    UnsupportedModelError,
    cache_dtype_of,
    code_digest,
    device_of,
    dtype_of,
    to_device,
)
from engine.embedded.models.heads import ROUND_DRAFTS, HeadRunner
from engine.embedded.models.paged import PagedRunner
from engine.embedded.models.runner import StepInput
from engine.embedded.models.shared_weights import SharedWeights, TensorLayout
from engine.embedded.models.torch.head import TorchHead
from engine.errors import EngineFailure
from engine.kit.collector import uncollected

log = logging.getLogger(__name__)

_FEW_READ = 1 << 14
"""Maximum number of keys that the prompts and drafts of a step may read for each head as if their tokens were decodes,
each of which reads all keys up to its own. Above, those of a chunk read them together."""
MOST_READ = 1 << 21
"""Maximum number of keys, those of each head counted, that groups of their tokens may read in a graph: above,
FlashInfer is faster than its planning and the launches of its kernels take."""

LEAST_SAVED = 1 << 14
"""Minimum number of keys that have not to be read for each head then: a pass of its own takes as long."""

_COMPRESSED_SHARE = 1 / 8
"""Share of a GPU's memory that compressed copies of weights may take: KV blocks have less of it then."""
_COMPRESSED_SHARE_OF_FREE = 1 / 2
"""Share of what is free, which is little where another engine or the KV cache of a larger model was first."""
_FP8_TOLERANCE = 0.5
"""Tolerance of logits, relative to the largest and to each, to see whether products of fp8 work. Rounding weights and
activations to three bits of mantissa makes random models of 8 and 32 layers wrong by 0.2 and 0.35 of the largest logit;
unrelated logits differ by 1.4."""


class CudaRunner(PagedRunner):
    """A `ModelRunner` for models of the Llama kind on an NVIDIA GPU: FlashInfer, Triton and CUDA graphs.

    The spare block and the spare slot are for the padding of graphs and for warming up.
    """

    spare_blocks = 1
    spare_slots = 1
    compute_path = "cuda"
    _weights: ReleasableWeights | None = None
    """Memory of weights that can be released."""
    _read = True
    """Whether they have been read since."""
    _copies: ReleasableWeights
    """Memory of compressed copies of these weights."""
    _copied = True
    """Whether they have been made since."""

    def __init__(self, config: EmbeddedConfig) -> None:
        begun = time.monotonic()
        expect_compilation()
        self._shape = _check(config)
        self._sizes = GraphSizes(config, self._shape)
        device = device_of(config)
        dtype = dtype_of(config, device)
        self._flashinfer = FlashInferKernels(device, dtype, cache_dtype_of(config, dtype), self._shape.head_dim)
        if is_bare() or not _can_begin_small(config):  # its compiler takes longest, or the start waits for it
            self._flashinfer.start()
        try:
            super().__init__(config, self._shape.facts)
        except Exception:
            self._flashinfer.close()
            raise
        log.info("loaded the weights in %.1f s", time.monotonic() - begun)
        self._decoder.taken = self._taken
        heads, scale = self._decoder.heads[0], self._decoder.scale
        self._attention = CudaAttention(
            self.cache, heads, scale, self.dtype, config.max_batch_size, self.context_length
        )
        self._spare_slot = config.max_batch_size
        largest = self._sizes.largest
        with torch.inference_mode():
            self.sampler: CudaSampler = CudaSampler(self.vocab_size, largest, self._sampled, self.eos_token_ids)
        self._graphs: dict[int, _Graph] = {}
        self._chunk_graphs: dict[int, _Graph] = {}
        self._beside_graphs: dict[int, _Graph] = {}
        self._cascade_graphs: dict[int, _Graph] = {}
        self._logits: torch.Tensor | None = None
        """Where all graphs of several rows write their logits: only one graph runs at a time."""
        self.cascades = 0
        """Number of steps that read shared prefixes once."""
        started = time.monotonic()
        self._compile()
        with torch.inference_mode():
            self.sampler.warm_up(self.dtype, self._spare_slot)
            self._decoder.load_products(config.max_num_tokens, largest)
        if not _can_begin_small(config):
            self._use_flashinfer()
        torch.cuda.synchronize()
        log.info("compiled and loaded kernels in %.1f s", time.monotonic() - started)
        if config.enable_cuda_graphs:
            self._capture()
            self.graph_tokens = largest
        self._flashinfer.start()  # not before: its import would hold up what serving waits for
        warn_of_compilation()

    @property
    def most_tokens(self) -> int | None:  # type: ignore[override]
        """See `ModelRunner`: FlashInfer takes steps of any size."""
        return None if self._attention.plans else self.graph_tokens

    def close(self) -> None:
        self._flashinfer.close()

    @property
    def graph_sizes(self) -> list[int]:
        """Numbers of tokens for which there is a graph, rising."""
        return sorted({*self._graphs, *self._chunk_graphs})

    def graph_of(self, step: StepInput) -> "_Graph | None":
        """Return the graph that runs a step.

        Few tokens of a prompt are as good as decodes. Where that has them read the same keys too often, there are
        graphs for chunks, and for chunks beside many decodes; where decodes do, graphs that attend to the prefixes they
        share first. Graphs above `GraphSizes.largest` tokens are for chunks, and compute the logits of few rows.
        """
        graphs, tokens, singles = self._graphs, len(step.tokens), step.singles
        if singles < len(step.lengths):
            prompts = list(zip(step.starts[singles:], step.lengths[singles:], strict=True))
            if tokens > self._sizes.largest or sum(length * (start + length) for start, length in prompts) > _FEW_READ:
                graphs, rows = self._chunk_graphs, self._attention.group_rows
                read = sum(-(-length // rows) * (start + length) for start, length in prompts)
                if read * self._decoder.heads[1] > MOST_READ and self._attention.plans:
                    return None
                if self._sizes.takes_apart(tokens) and self._attention.are_even(step.starts[:singles]):
                    graphs = self._beside_graphs
        elif self._cascade_graphs and tokens <= next(reversed(self._cascade_graphs)):
            saved = sum(
                (len(rows) - -(-len(rows) // self._attention.group_rows)) * shared
                for rows, shared in self._attention.prefixes(step)
            )
            if saved >= LEAST_SAVED:
                graphs = self._cascade_graphs
        graph = next((graph for size, graph in graphs.items() if size >= tokens), None)
        return graph if graph is not None and len(step.rows) <= self._sizes.rows(graph.size) else None

    @torch.inference_mode()
    def expect(self, slot: int, admission: int, tables: Sequence[list[int]]) -> None:
        self._attention.note_blocks([slot], [admission], [tables])

    @torch.inference_mode()
    def forward(self, step: StepInput) -> torch.Tensor:
        if not self._attention.plans and self._flashinfer.ready:
            try:
                self._use_flashinfer()
            except RuntimeError as error:
                self._flashinfer.give_up(error)
        self._attention.note_blocks(step.slots, step.admissions, step.tables)
        if step.embeddings is not None:
            self._decoder.show(step.embeddings.embeddings)
        if (graph := self.graph_of(step)) is not None:
            return self._replay(graph, step)
        if not self._attention.plans:  # more than `most_tokens`
            self._use_flashinfer()
        return self._run_eagerly(step)

    def _run_eagerly(self, step: StepInput) -> torch.Tensor:
        size = len(step.tokens)
        tokens, positions, slots, targets = self._inputs(step, size).view(4, size)
        attention_step = self._attention.mixed(step, slots, positions)
        tokens, x = embed(tokens, self._sampled, self._decoder.embeddings)
        rows = self._to_device(step.rows)
        logits = self._decoder(x, positions, self._attention, attention_step, rows)
        self.hidden = self._decoder.hidden
        if count := sum(step.sampled):
            drawn = rows[-count:]
            self.sampler.results = self.sampler.run(logits[-count:], targets[drawn], positions[drawn], tokens[drawn])
        return logits

    def load_head(self, head: EagleHead, spare_blocks: int) -> HeadRunner:
        """See `ModelRunner`: a head by kernels, or by torch's operations where those do not fit."""
        blocks, size = self.groups[0].num_blocks + spare_blocks, self.cache.block_size
        if head.facts.head_dim & (head.facts.head_dim - 1):
            return TorchHead(head, self._decoder.embed, self._decoder.output, blocks, size)
        loaded = CudaHead(
            head,
            self._decoder.embeddings,
            self._decoder.output,
            blocks=blocks,
            block_size=size,
            positions=self.context_length,
            most_tokens=self._config.speculative_tokens,
            batch=self._config.max_batch_size,
            graphs=self._config.enable_cuda_graphs,
        )
        if self._config.enable_cuda_graphs and self._config.speculative_tokens >= ROUND_DRAFTS:
            loaded.rounds = CudaRounds.of(loaded, self._decoded, self._sizes.largest, self._spare_slot)
        return loaded

    def _decoded(self, inputs: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step of decodes alone as a graph does; return the tokens drawn, and the hidden states for a head."""
        kind, _, _ = self._graph_kinds()[0]
        _, hidden, tokens, _ = self._run_whole(inputs, size, kind)
        assert hidden is not None, "a head needs hidden states"
        return tokens, hidden

    def remember(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Keep tokens that the sampler did not draw: it keeps its own."""
        if tokens is not self.sampler.results.tokens:
            self._sampled[self._to_device(slots)] = tokens

    def _load(self) -> Attends:
        """Load the weights, into memory of the memory service if there is one, or take those that are there."""
        with SharedWeights(self._config) as self.shared_weights, self._opened() as checkpoint:
            if checkpoint is not None:
                self._shape = replace(self._shape, tied="lm_head.weight" not in checkpoint)
                if unused := checkpoint.unused:
                    log.warning("the model does not use all that %s has: %s", checkpoint.folder, some(unused))
            if self.takes_images:
                self.shared_weights.give_up("this model takes images, whose embeddings lie beside those of its tokens")
            alone = self.takes_images or not self._config.memory_service
            if alone or not self._load_shared(self.shared_weights, checkpoint):
                self._load_own(checkpoint)
        return self._shape.attends

    def _load_shared(self, shared: SharedWeights, checkpoint: Checkpoint | None) -> bool:
        """Have the weights in memory of the memory service, filled here or by another engine; return whether there is
        any."""
        decoder = LlamaDecoder(self._shape, self.dtype, self.device, weights_on=torch.device("meta"))
        if self._config.quantization == "fp8":
            decoder.quantise()
        layout = TensorLayout(decoder.move)
        form = (
            self.dtype,
            self._config.quantization,
            self._config.load_format,
            torch.__version__,
            code_digest(Path(__file__).parent),
        )
        pages = shared.pages(layout.size, self.device, *form)
        if pages is None:
            return False
        if pages.filled:
            decoder.move(layout.views(pages, self.device))
            self._decoder = decoder
        else:
            self._decoder = self._make_decoder(checkpoint)
            layout.copy(self._decoder.move, pages, self.device)
            self._settle()
        return True

    def _load_own(self, checkpoint: Checkpoint | None) -> None:
        """Load weights that are not shared, where they can be released if the engine sleeps."""
        self._decoder = self._make_decoder(checkpoint)
        self._compress()
        if self._config.sleep is not None:
            self._weights, self._copies = ReleasableWeights(self.device), ReleasableWeights(self.device)
            with torch.inference_mode():
                self._decoder.move(self._weights.place)
                self._decoder.move_copies(self._copies.place)

    @torch.inference_mode()
    def _compress(self) -> None:
        """Keep compressed copies of the weights, if they are to be kept."""
        free, memory = torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else (0, 0)
        if not keeps_copies(self._config, self.dtype, self._decoder.bytes_compressed, free, memory):
            return
        try:
            size = self._decoder.compress()
        except torch.OutOfMemoryError as error:
            raise EngineFailure(f"COMPRESSED_WEIGHTS: no memory for copies of the weights: {error}") from error
        log.info("compressed copies of the weights take %.1f GB", size / 1e9)
        self._settle()

    def _opened(self) -> AbstractContextManager[Checkpoint | None]:
        """Open the files of the weights; None for random weights."""
        dummy = self._config.load_format == "dummy"
        return nullcontext() if dummy else Checkpoint(Path(self._config.model), self._shape)

    @torch.inference_mode()
    def _make_decoder(self, checkpoint: Checkpoint | None) -> LlamaDecoder:
        """Return a decoder with the weights of the files, or random ones, quantised if they are to be."""
        most_shown = self._config.max_num_tokens if self.takes_images else 0
        decoder = LlamaDecoder(self._shape, self.dtype, self.device, most_shown)
        _fill(decoder, checkpoint)
        if self._config.quantization == "fp8":
            expected = self._try_out(decoder)
            decoder.quantise()
            found = self._try_out(decoder)
            nearest = _FP8_TOLERANCE * float(expected.abs().max())
            if not torch.allclose(found, expected, rtol=_FP8_TOLERANCE, atol=nearest):
                model_type = self._shape.facts.model_type
                raise UnsupportedModelError(f"{model_type} does not bear products of fp8, or this machine has none")
        self._settle()
        return decoder

    def _try_out(self, decoder: LlamaDecoder) -> torch.Tensor:
        compile_first(lambda: trial(decoder, self.cache_dtype, self.device))
        return trial(decoder, self.cache_dtype, self.device)

    def _release_weights(self, level: int) -> None:
        if self._weights is not None:  # else they are in memory of the service
            self._weights.release(keep=level == 1)
            self._copies.release(keep=False)

    @torch.inference_mode()
    def resume_memory(self, tags: Collection[Tag]) -> None:
        """Take memory of KV blocks while weights are copied, but after weights that have to be read: these may take
        memory twice meanwhile."""
        others = partial(self._resume_cache, tags)
        if "weights" in tags and self._weights is not None:
            if not (self._weights.resume(others) and self._read):
                self._read_again()
            self._copied &= self._copies.resume()
            if not self._copied:
                self._decoder.compress_again()
                self._copied = True
        others()

    def _read_again(self) -> None:
        """Read the weights of files that have been read before, to the same addresses."""
        self._read = False
        assert self._weights is not None
        self._weights.forget()
        with self._opened() as checkpoint:
            if self._config.quantization == "fp8":
                for tensor, read in zip(_tensors(self._decoder), _tensors(self._make_decoder(checkpoint)), strict=True):
                    tensor.copy_(read)
            else:
                _fill(self._decoder, checkpoint)
        self._read = True
        self._settle()

    def _settle(self) -> None:
        """Wait for the device, and give back what torch keeps for later."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _set_aside(self, config: EmbeddedConfig) -> int:
        rows = self._sizes.most_rows * config.enable_cuda_graphs
        logits = rows * self.vocab_size * self.dtype.itemsize
        slots = config.max_batch_size + self.spare_slots
        return CudaSampler.count_bytes(self.vocab_size, self._sizes.largest, slots) + logits

    def _replay(self, graph: "_Graph", step: StepInput) -> torch.Tensor:
        """Return the logits of the rows wanted; the sampler has the tokens of those to sample from."""
        graph.inputs.copy_(self._packed(step, graph.size, graph.kind), non_blocking=True)
        graph.graph.replay()
        self.cascades += graph.kind.name == "cascade"
        self.hidden = graph.hidden
        rows, count = step.rows, sum(step.sampled)
        if self._sizes.chosen(graph.size) or rows == list(range(len(rows))):
            first = len(rows) - count
            self.sampler.results = RowDraws(graph.tokens[first : len(rows)], graph.reports[first : len(rows)])
            return graph.logits[: len(rows)]
        wanted = self._to_device(rows)
        drawn = wanted[len(rows) - count :]
        self.sampler.results = RowDraws(graph.tokens[drawn], graph.reports[drawn])
        return graph.logits[wanted]

    def _run_whole(
        self, inputs: torch.Tensor, size: int, kind: "_GraphKind"
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Run a step as a graph does: compute the logits of all rows, or of those that the inputs choose, and draw a
        token for each."""
        tokens, positions, slots, targets = inputs[: 4 * size].view(4, size)
        end = 4 * size + kind.more(size)
        step = kind.prepare(slots, positions, inputs[4 * size : end])
        tokens, x = embed(tokens, self._sampled, self._decoder.embeddings)
        chosen, rows = inputs[end:], None
        if len(chosen):
            rows = chosen.clamp(min=0).long()
        logits = self._decoder(x, positions, self._attention, step, rows, self._logits)
        if rows is not None:
            targets = torch.where(chosen < 0, self._spare_slot, targets[rows])
            positions, tokens = positions[rows], tokens[rows]
        return logits, self._decoder.hidden, *self.sampler.run(logits, targets, positions, tokens)

    def _inputs(self, step: StepInput | None, size: int, kind: "_GraphKind | None" = None) -> torch.Tensor:
        """Return a step's inputs on the device: see `_packed`."""
        return self._packed(step, size, kind).to(self.device, non_blocking=True)

    def _packed(self, step: StepInput | None, size: int, kind: "_GraphKind | None") -> torch.Tensor:
        """Return a step's inputs in pinned memory, int32: four rows of `size` values, which are token ids, positions,
        slots, and slots of what is sampled, filled up with the spare slot; then what its kind of graph has more.
        Without a step, all of it is padding. Those of a large graph end with the rows whose logits are wanted, filled
        up with -1.

        Rows of images have token ids behind the vocabulary, as the decoder has been shown their embeddings.
        """
        end = 4 * size + (kind.more(size) if kind is not None else 0)
        chosen = 0 if kind is None else self._sizes.chosen(size)
        inputs = np.zeros(end + chosen, dtype=np.int32)
        values = inputs[: 4 * size].reshape(4, size)
        values[2:] = self._spare_slot
        if step is not None:
            self._fill(values, step)
        if kind is not None:
            kind.plan(step, values[1], inputs[4 * size : end])
        if chosen:
            inputs[end:] = -1
            if step is not None:
                inputs[end : end + len(step.rows)] = step.rows
        return torch.from_numpy(inputs).pin_memory()

    def _fill(self, values: NDArray[np.int32], step: StepInput) -> None:
        """Write the tokens of a step to its four rows of inputs."""
        count, slots = len(step.tokens), np.array(step.slots, dtype=np.int32)
        values[0, :count] = step.tokens
        values[1, :count] = step.positions
        sampled = np.array(step.sampled)
        if count == len(slots):  # decodes alone, as most steps are
            values[2, :count] = slots
            values[3, :count] = np.where(sampled.astype(bool), slots, self._spare_slot)
        else:
            lengths = np.array(step.lengths)
            values[2, :count] = slots.repeat(lengths)
            ends = zip(lengths.cumsum().tolist(), step.sampled, strict=True)
            values[3, [row for end, drawn in ends for row in range(end - drawn, end)]] = slots.repeat(sampled)
        if step.embeddings is not None:
            shown = step.embeddings.rows
            values[0, shown] = self._decoder.vocabulary + np.arange(len(shown))

    def _plan_chunks(self, step: StepInput | None, positions: NDArray[np.int32], values: NDArray[np.int32]) -> None:
        self._attention.plan_chunks([] if step is None else step.lengths, 0, positions, values)

    def _plan_beside(self, step: StepInput | None, positions: NDArray[np.int32], values: NDArray[np.int32]) -> None:
        lengths, decodes = ([], 0) if step is None else (step.lengths, step.singles)
        self._attention.plan_chunks(lengths, decodes, positions, values)

    def _plan_cascade(self, step: StepInput | None, positions: NDArray[np.int32], values: NDArray[np.int32]) -> None:
        prefixes = [] if step is None else self._attention.prefixes(step)
        self._attention.plan_cascade(prefixes, values, len(positions))

    def _to_device(self, indices: Sequence[int]) -> torch.Tensor:
        return to_device(indices, torch.int64, self.device)

    @torch.inference_mode()
    def _use_flashinfer(self) -> None:
        """Wait for FlashInfer, and have it compute prompts from now on. Raises UnsupportedModelError, or RuntimeError
        if it cannot run."""
        self._flashinfer.wait()
        self._attention.use_flashinfer()
        try:
            self._try_flashinfer()
        except RuntimeError:
            self._attention.forget_flashinfer()
            raise

    def _try_flashinfer(self) -> None:
        """Run every kernel of steps of prompts: two that begin, then one that goes on and one that decodes."""
        size = self.cache.block_size
        spare_block = len(self.cache.data) - 1
        for starts in ((0, 0), (2 * size - 1, size)):
            lengths = [2 * size - start for start in starts]
            positions = [position for start in starts for position in range(start, 2 * size)]
            self._run_eagerly(
                StepInput(
                    tokens=[0] * len(positions),
                    positions=positions,
                    starts=starts,
                    lengths=lengths,
                    slots=[self._spare_slot] * 2,
                    admissions=[0] * 2,
                    tables=[[[spare_block] * 2]] * 2,
                    sampled=[1] * 2,
                    rows=[0, 1],
                )
            )

    @torch.inference_mode()
    def _compile(self) -> None:
        """Compile the kernels of graphs and of guided rows."""

        def compute() -> None:
            for kind, _, sizes in self._graph_kinds():
                for size in sizes:
                    self._run_whole(self._inputs(None, size, kind), size, kind)
            self.sampler.warm_up(self.dtype, self._spare_slot)

        compile_first(compute)

    def _capture(self) -> None:
        """Capture a graph for each kind and size, the largest first, so that the others find its memory."""
        started = time.monotonic()
        pool: Any = None
        count = 0
        self._logits = torch.empty(self._sizes.most_rows, self.vocab_size, dtype=self.dtype, device=self.device)
        for kind, graphs, sizes in self._graph_kinds():
            captured = {}
            for size in reversed(sizes):
                with torch.inference_mode(), uncollected():
                    inputs = self._inputs(None, size, kind)
                    graph, outputs = capture(partial(self._run_whole, inputs, size, kind), pool)
                pool = graph.pool()
                captured[size] = _Graph(kind, size, graph, inputs, *outputs)
            graphs.update(sorted(captured.items()))
            count += len(captured)
        log.info("captured %d CUDA graphs in %.1f s", count, time.monotonic() - started)

    def _graph_kinds(self) -> list[tuple["_GraphKind", dict[int, "_Graph"], list[int]]]:
        """Return each kind of graphs, where they are kept, and their sizes."""
        attention, sizes = self._attention, self._sizes
        decodes = _GraphKind("decodes", lambda *rows: attention.decode(*rows[:2]), lambda _: 0, lambda *_: None)
        chunks = _GraphKind("chunks", attention.chunks, attention.chunks_size, self._plan_chunks)
        beside = _GraphKind("beside", attention.beside_chunks, attention.chunks_size, self._plan_beside)
        cascade = _GraphKind("cascade", attention.cascade, attention.cascade_size, self._plan_cascade)
        return [
            (decodes, self._graphs, sizes.decodes),
            (chunks, self._chunk_graphs, sizes.chunks),
            (beside, self._beside_graphs, sizes.beside),
            (cascade, self._cascade_graphs, sizes.cascades),
        ]


def _fill(decoder: LlamaDecoder, checkpoint: Checkpoint | None) -> None:
    """Fill a decoder with the weights of a checkpoint, or with random ones."""
    if checkpoint is None:
        decoder.randomise()
    else:
        checkpoint.fill(decoder.parts)


def _tensors(decoder: LlamaDecoder) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    decoder.move(note)
    return found


def _can_begin_small(config: EmbeddedConfig) -> bool:
    """Return whether an engine may serve before FlashInfer's kernels are compiled: small steps are graphs and need
    prompts in chunks, and KV tiers are weighed against the speed of large ones."""
    tiers = config.kv_host_cache_mb or config.kv_disk_cache_mb
    return config.enable_cuda_graphs and config.enable_chunked_prefill and not tiers


def _check(config: EmbeddedConfig) -> LlamaConfig:
    """Check what is known before anything is loaded, and return the model's sizes. Raises UnsupportedModelError."""
    if torch.cuda.get_device_capability() < (9, 0):
        raise UnsupportedModelError(
            f"the kernels are for compute capability 9.0 and later, not for {torch.cuda.get_device_name()}"
        )
    device = device_of(config)
    if device.type == "cuda" and dtype_of(config, device) == torch.float32:
        raise UnsupportedModelError("FlashInfer computes in 16 bits, and the model in float32 (DTYPE)")
    if config.quantization == "fp8" and dtype_of(config, torch.device("cuda")) != torch.bfloat16:
        raise UnsupportedModelError(f"products of fp8 are bfloat16, and DTYPE is {config.dtype}")
    shape = read_config(Path(config.model), config.max_seq_len)
    check_kind(shape)
    if config.compressed_weights == "on":
        _check_compression(config)
    if shape.biased and config.kv_cache_dtype == "fp8":
        raise UnsupportedModelError(
            f"keys of {shape.facts.text_type} have biases so large that eight bits lose what differs between tokens"
        )
    return shape


def keeps_copies(config: EmbeddedConfig, dtype: torch.dtype, size: int, free: int, memory: int) -> bool:
    """Return whether to keep compressed copies of so many bytes on a GPU with so much memory, of which so much is
    free."""
    wanted = config.compressed_weights
    if not size or wanted == "off" or config.quantization != "none" or dtype != torch.bfloat16:
        return False
    return wanted == "on" or size <= min(_COMPRESSED_SHARE * memory, _COMPRESSED_SHARE_OF_FREE * free)


def _check_compression(config: EmbeddedConfig) -> None:
    """Raise UnsupportedModelError if no compressed copies can be kept."""
    if config.quantization != "none" or dtype_of(config, torch.device("cuda")) != torch.bfloat16:
        raise UnsupportedModelError("weights are compressed in bfloat16 (DTYPE) without QUANTIZATION")
    if config.memory_service:
        raise UnsupportedModelError("compressed copies of weights are not shared (MEMORY_SERVICE)")


class _GraphKind(NamedTuple):
    """A way to compute a step's attention in a graph."""

    name: str
    prepare: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], AttentionStep]
    """Takes slots and positions, and what the inputs have besides the rows that all kinds have."""
    more: Callable[[int], int]
    """Number of these values for a number of tokens."""
    plan: Callable[[StepInput | None, NDArray[np.int32], NDArray[np.int32]], None]
    """Writes them on the host. Takes the step, None if all of it is padding, and its positions."""


class _Graph(NamedTuple):
    """A captured step of some number of tokens: what it reads and what it writes."""

    kind: _GraphKind
    size: int
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor | None
    tokens: torch.Tensor
    reports: torch.Tensor
