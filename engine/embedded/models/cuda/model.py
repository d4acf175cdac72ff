"""A model on a GPU: inputs by one copy, steps of few tokens as CUDA graphs, others eagerly. Nothing here waits for the device but for the
embeddings of images."""

import logging
import time
from collections.abc import Sequence as Sequence_
from typing import Any

import numpy as np
import torch

from engine.config import EmbeddedConfig
from engine.embedded.kv.layout import Attends
from engine.embedded.models.cuda.attention import CudaAttention
from engine.embedded.models.cuda.decoder import LlamaDecoder, is_llama_kind, trial, trial_by_transformers
from engine.embedded.models.embeddings import image_rows
from engine.embedded.models.load import UnsupportedModelError, dtype_of
from engine.embedded.models.torch.model import Model
from engine.embedded.models.transformers_models import auto_class, load_config
from engine.embedded.scheduler import Chunk
from engine.embedded.sequence import Sequence
from engine.types import GenerateRequest, SamplingParams

log = logging.getLogger(__name__)

_SPACING = ((64, 16), (256, 32), (1 << 30, 64))
"""Below how many rows graphs are how far apart, from 16 on."""
_SHORT_PROMPT = 256
"""Tokens of a step that has a graph, however few sequences run: what a chat that goes on adds to its prompt is often no more."""
_MOST_READ = 1 << 17
"""Most keys that the prompts of a graph's step may read for each head: above, FlashInfer is faster than its planning takes."""

_TOLERANCE = 0.05
"""Of logits, as a part of the largest and of each: what bfloat16 explains."""
_FP8_TOLERANCE = 0.5
"""The model's kind is certain by then; this is whether products of fp8 work. Rounding to three bits of mantissa, weights and activations,
makes random models of 8 and 32 layers wrong by 0.2 and 0.35 of the largest logit; logits that have nothing in common differ by 1.4."""


class CudaModel(Model):
    """Models of the Llama kind: FlashInfer, Triton and CUDA graphs. Raises UnsupportedModelError and EngineFailure."""

    spare_blocks = 1
    compute_path = "cuda"

    def __init__(self, config: EmbeddedConfig) -> None:
        _check(config)
        super().__init__(config)
        heads, scale = self._decoder.heads[0], self._decoder.scale
        self._attention = CudaAttention(
            self.cache, heads, scale, self.dtype, config.max_batch_size, self.context_length
        )
        self._sampled = torch.zeros(config.max_batch_size + 1, dtype=torch.int64, device=self.device)
        """The last token of each slot."""
        self._spare_slot = config.max_batch_size
        self._likeliest = self._sampled[:0], self._sampled[:0]
        """Logits and likeliest tokens of the last graph."""
        self._graphs: dict[int, _Graph] = {}
        self._warm_up()
        with torch.inference_mode():
            self._decoder.load_products(config.max_num_tokens)
        if config.enable_cuda_graphs:
            self._capture(max(config.max_batch_size, min(_SHORT_PROMPT, config.max_num_tokens)))

    def ordered(self, chunks: list[Chunk]) -> list[Chunk]:
        """Decodes first."""
        return sorted(chunks, key=_is_prompt) if any(map(_is_prompt, chunks)) else chunks

    @torch.inference_mode()
    def forward(self, chunks: Sequence_[Chunk], rows: Sequence_[int]) -> torch.Tensor:
        self._attention.note_blocks(chunks)
        count = sum(chunk.length for chunk in chunks)
        images = image_rows(chunks, self.dtype, self.device)
        if images is not None:
            self._decoder.show(images.embeddings)
        shown = images.rows if images is not None else []
        if size := self._graph_size(chunks, count):
            return self._replay(self._graphs[size], self._inputs(chunks, size, shown), rows)
        tokens, positions, slots, _ = self._inputs(chunks, count, shown)
        step = self._attention.mixed(chunks, slots, positions)
        return self._decoder(
            self._decoder.embed(self._token_ids(tokens)), positions, self._attention, step, self._to_device(rows)
        )

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return self._likeliest[1] if logits is self._likeliest[0] else logits.argmax(dim=1)

    @torch.inference_mode()
    def remember(self, slots: Sequence_[int], tokens: torch.Tensor) -> None:
        if tokens is self._likeliest[1]:
            return
        self._sampled[self._to_device(slots)] = tokens

    def _adapt(self, config: EmbeddedConfig, attends: Attends) -> None:
        """The weights are joined, and quantised, layer by layer: what that gives back is there for KV blocks."""
        if set(attends.windows) != {None}:
            raise UnsupportedModelError(f"{self.hf_config.model_type} has sliding windows")
        with torch.inference_mode():
            expected = trial_by_transformers(self._module)
            self._decoder = LlamaDecoder(
                self._module, self.context_length, config.max_num_tokens if self.takes_images else 0
            )
            if not self._agrees(expected, _TOLERANCE):
                raise UnsupportedModelError(f"{self.hf_config.model_type} computes something else than Llama does")
            if config.quantization == "fp8":
                self._decoder.quantise()
                if not self._agrees(expected, _FP8_TOLERANCE):
                    raise UnsupportedModelError(
                        f"{self.hf_config.model_type} does not bear products of fp8, or this machine has none"
                    )
        self._module = None
        torch.cuda.empty_cache()

    def _agrees(self, expected: torch.Tensor, tolerance: float) -> bool:
        """Whether the decoder's logits are these but for a part of the largest, and of each."""
        found = trial(self._decoder, self.cache_dtype, self.device)
        return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))

    def _graph_size(self, chunks: Sequence_[Chunk], count: int) -> int:
        """The graph to run a step of `count` tokens, 0 for none. A token of a prompt is as good as a decode there, if it has not too many
        before it: each of them reads all keys up to its own."""
        if (
            count > len(chunks)
            and sum(chunk.length * (chunk.start + chunk.length) for chunk in chunks if _is_prompt(chunk)) > _MOST_READ
        ):
            return 0
        return next((size for size in self._graphs if size >= count), 0)

    def _replay(self, graph: "_Graph", inputs: torch.Tensor, rows: Sequence_[int]) -> torch.Tensor:
        """Logits of these rows; `argmax` has their likeliest tokens, and they are remembered."""
        graph.inputs.copy_(inputs)
        graph.graph.replay()
        if rows == list(range(len(rows))):
            self._likeliest = graph.logits[: len(rows)], graph.tokens[: len(rows)]
        else:
            wanted = self._to_device(rows)
            self._likeliest = graph.logits[wanted], graph.tokens[wanted]
        return self._likeliest[0]

    def _run_whole(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a graph does: the step, and the likeliest tokens, remembered as if they had been sampled."""
        tokens, positions, slots, targets = inputs
        step = self._attention.decode(slots, positions)
        logits = self._decoder(self._decoder.embed(self._token_ids(tokens)), positions, self._attention, step, None)
        likeliest = logits.argmax(dim=1)
        self._sampled.index_copy_(0, targets.long(), likeliest)
        return logits, likeliest

    def _token_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """A negative id -1 - slot stands for the pending token of a slot."""
        pending = self._sampled[(-1 - tokens).clamp_(min=0).long()]
        return torch.where(tokens < 0, pending, tokens.long())

    def _inputs(self, chunks: Sequence_[Chunk], size: int, shown: Sequence_[int]) -> torch.Tensor:
        """int32 [4, size] on the device: token ids, positions, slots and slots of what is sampled, filled up with the spare slot. The
        tokens in the rows `shown` are those that the decoder has been shown embeddings for, in order."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        targets: list[int] = []
        for sequence, start, length, samples, _ in chunks:
            if length == 1:  # by far the most: a decode
                tokens.append(sequence.tokens[start] if start < len(sequence.tokens) else -1 - sequence.slot)
                positions.append(start)
                slots.append(sequence.slot)
            else:
                tokens += sequence.tokens[start : start + length]
                positions += range(start, start + length)
                slots += [sequence.slot] * length
                targets += [self._spare_slot] * (length - 1)
            targets.append(sequence.slot if samples else self._spare_slot)
        values = np.zeros((4, size), dtype=np.int32)
        values[2:] = self._spare_slot
        values[:, : len(tokens)] = tokens, positions, slots, targets
        values[0, shown] = self._decoder.vocabulary + np.arange(len(shown))
        return torch.from_numpy(values).pin_memory().to(self.device, non_blocking=True)

    def _to_device(self, indices: Sequence_[int]) -> torch.Tensor:
        return torch.tensor(indices, dtype=torch.int64, pin_memory=True).to(self.device, non_blocking=True)

    def _warm_up(self) -> None:
        """Have every kernel of prompts compiled and loaded: two that begin, then one that goes on and one that decodes."""
        started, size = time.monotonic(), self.cache.block_size
        blocks = [len(self.cache.data) - 1] * 2
        request = GenerateRequest(
            request_id="", prompt_token_ids=(0,) * 2 * size, sampling=SamplingParams(max_tokens=1)
        )
        # Without a sampler: nothing is sampled.
        first, second = (
            Sequence(request, None, 0.0, 0.0, [0] * 2 * size, tables=[blocks], slot=self._spare_slot)  # type: ignore[arg-type]
            for _ in range(2)
        )
        for starts in ((0, 0), (size, 2 * size - 1)):
            chunks = [
                Chunk(sequence, start, 2 * size - start, True, 0)
                for sequence, start in zip((first, second), starts, strict=True)
            ]
            self.forward(self.ordered(chunks), [0, 1])
        torch.cuda.synchronize()
        log.info("kernels of prompts are ready after %.1f s", time.monotonic() - started)

    def _capture(self, largest: int) -> None:
        """A graph for each size, the largest first, so that the others find its memory."""
        started = time.monotonic()
        pool: Any = None
        for size in reversed(_sizes(largest)):
            inputs = torch.zeros(4, size, dtype=torch.int32, device=self.device)
            inputs[2:] = self._spare_slot
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.inference_mode(), torch.cuda.stream(stream):
                self._run_whole(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
                logits, tokens = self._run_whole(inputs)
            pool = graph.pool()
            self._graphs[size] = _Graph(graph, inputs, logits, tokens)
        self._graphs = dict(sorted(self._graphs.items()))
        log.info("%d CUDA graphs in %.1f s", len(self._graphs), time.monotonic() - started)


def _check(config: EmbeddedConfig) -> None:
    """What can be known before anything is loaded."""
    if torch.cuda.get_device_capability() < (9, 0):
        raise UnsupportedModelError(
            f"the kernels are for compute capability 9.0 and later, not for {torch.cuda.get_device_name()}"
        )
    if config.quantization == "fp8" and dtype_of(config, torch.device("cuda")) != torch.bfloat16:
        raise UnsupportedModelError(f"products of fp8 are bfloat16, and DTYPE is {config.dtype}")
    hf_config, _ = load_config(config.model)
    if set(getattr(hf_config.get_text_config(), "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise UnsupportedModelError(f"{hf_config.model_type} has layers that do not attend to everything")
    with torch.device("meta"):
        if not is_llama_kind(auto_class(hf_config).from_config(hf_config)):
            raise UnsupportedModelError(f"{hf_config.model_type} is not built as Llama is")


class _Graph:
    """A step of so many tokens: what it reads and what it writes."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, inputs: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        self.graph, self.inputs, self.logits, self.tokens = graph, inputs, logits, tokens


def _is_prompt(chunk: Chunk) -> bool:
    return chunk.length > 1


def _sizes(largest: int) -> list[int]:
    """Sizes of steps that have a graph of their own: powers of two, then ever wider apart."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + next(apart for limit, apart in _SPACING if sizes[-1] < limit))
    return [*(size for size in sizes if size < largest), largest]
