"""A model on a GPU: inputs by one copy, decode steps as CUDA graphs, prompts and mixtures eagerly. Nothing here waits for the device."""

import logging
import time
from collections.abc import Sequence as Sequence_
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded.cuda.attention import CudaAttention
from engine.embedded.cuda.decoder import LlamaDecoder, is_llama_kind, trial, trial_by_transformers
from engine.embedded.load import UnsupportedModelError
from engine.embedded.model import Model
from engine.embedded.scheduler import Chunk
from engine.embedded.sequence import Sequence
from engine.types import GenerateRequest, SamplingParams

log = logging.getLogger(__name__)

_SPACING = ((8, 8), (64, 16), (256, 32), (1 << 30, 64))
"""Up to how many rows graphs are how far apart."""


class CudaModel(Model):
    """Models of the Llama kind: FlashInfer, Triton and CUDA graphs. Raises UnsupportedModelError and EngineFailure."""

    spare_blocks = 1

    def __init__(self, config: EmbeddedConfig) -> None:
        _check(config)
        super().__init__(config)
        if len(self.groups) > 1 or self.groups[0].window is not None:
            raise UnsupportedModelError(f"{self.hf_config.model_type} has sliding windows")
        first = self._module.model.layers[0].self_attn
        heads = first.q_proj.out_features // first.head_dim
        self._attention = CudaAttention(self.cache, heads, first.scaling, config.max_batch_size, self.context_length)
        with torch.inference_mode():
            expected = trial_by_transformers(self._module)
            self._decoder = LlamaDecoder(self._module, self._attention, self.context_length)
            if not torch.allclose(trial(self._decoder, self.cache), expected, rtol=0.05, atol=0.05 * float(expected.abs().max())):
                raise UnsupportedModelError(f"{self.hf_config.model_type} computes something else than Llama does")
        self._module = None
        torch.cuda.empty_cache()
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
            self._capture(config.max_batch_size)

    def ordered(self, chunks: list[Chunk]) -> list[Chunk]:
        """Decodes first."""
        return sorted(chunks, key=_is_prompt) if any(map(_is_prompt, chunks)) else chunks

    @torch.inference_mode()
    def forward(self, chunks: Sequence_[Chunk], rows: Sequence_[int]) -> torch.Tensor:
        self._attention.note_blocks(chunks)
        if all(chunk.length == 1 for chunk in chunks) and len(rows) == len(chunks):
            return self._decode(chunks)
        tokens, positions, slots = self._inputs(chunks, sum(chunk.length for chunk in chunks))
        step = self._attention.mixed(chunks, slots, positions)
        wanted = torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(self.device, non_blocking=True)
        return self._decoder(self._token_ids(tokens), positions, step, wanted)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return self._likeliest[1] if logits is self._likeliest[0] else logits.argmax(dim=1)

    @torch.inference_mode()
    def remember(self, slots: Sequence_[int], tokens: torch.Tensor) -> None:
        if tokens is self._likeliest[1]:
            return
        index = torch.tensor(slots, dtype=torch.int64, pin_memory=True).to(self.device, non_blocking=True)
        self._sampled[index] = tokens

    def _decode(self, chunks: Sequence_[Chunk]) -> torch.Tensor:
        size = next((size for size in self._graphs if size >= len(chunks)), 0)
        inputs = self._inputs(chunks, size or len(chunks))
        if not size:
            return self._run_decode(*inputs)
        graph = self._graphs[size]
        graph.inputs.copy_(inputs)
        graph.graph.replay()
        self._likeliest = graph.logits[: len(chunks)], graph.tokens[: len(chunks)]
        return self._likeliest[0]

    def _run_decode(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return self._decoder(self._token_ids(tokens), positions, self._attention.decode(slots, positions), None)

    def _run_whole(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A decode step, and the likeliest tokens, remembered as if they had been sampled."""
        logits = self._run_decode(*inputs)
        tokens = logits.argmax(dim=1)
        self._sampled.index_copy_(0, inputs[2].long(), tokens)
        return logits, tokens

    def _token_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """A negative id -1 - slot stands for the pending token of a slot."""
        pending = self._sampled[(-1 - tokens).clamp_(min=0).long()]
        return torch.where(tokens < 0, pending, tokens.long())

    def _inputs(self, chunks: Sequence_[Chunk], size: int) -> torch.Tensor:
        """int32 [3, size] on the device: token ids, positions and slots, filled up with tokens of the spare slot."""
        values = np.zeros((3, size), dtype=np.int32)
        values[2] = self._spare_slot
        if all(chunk.length == 1 for chunk in chunks):
            sequences = [chunk.sequence for chunk in chunks]
            starts = [chunk.start for chunk in chunks]
            values[0, : len(chunks)] = [
                sequence.tokens[start] if start < len(sequence.tokens) else -1 - sequence.slot
                for sequence, start in zip(sequences, starts, strict=True)
            ]
            values[1, : len(chunks)] = starts
            values[2, : len(chunks)] = [sequence.slot for sequence in sequences]
            return self._to_device(values)
        row = 0
        for chunk in chunks:
            sequence, end = chunk.sequence, row + chunk.length
            known = sequence.tokens[chunk.start : chunk.start + chunk.length]
            values[0, row:end] = known or -1 - sequence.slot
            values[1, row:end] = range(chunk.start, chunk.start + chunk.length)
            values[2, row:end] = sequence.slot
            row = end
        return self._to_device(values)

    def _to_device(self, values: "np.ndarray[Any, np.dtype[np.int32]]") -> torch.Tensor:
        return torch.from_numpy(values).pin_memory().to(self.device, non_blocking=True)

    def _warm_up(self) -> None:
        """Have every kernel of prompts compiled and loaded: two that begin, then one that goes on and one that decodes."""
        started, size = time.monotonic(), self.cache.block_size
        blocks = [len(self.cache.data) - 1] * 2
        request = GenerateRequest(request_id="", prompt_token_ids=(0,) * 2 * size, sampling=SamplingParams(max_tokens=1))
        # Without a sampler: nothing is sampled.
        first, second = (Sequence(request, None, 0.0, 0.0, [0] * 2 * size, tables=[blocks], slot=self._spare_slot) for _ in range(2))  # type: ignore[arg-type]
        for starts in ((0, 0), (size, 2 * size - 1)):
            chunks = [Chunk(sequence, start, 2 * size - start, True, 0) for sequence, start in zip((first, second), starts, strict=True)]
            self.forward(self.ordered(chunks), [0, 1])
        torch.cuda.synchronize()
        log.info("kernels of prompts are ready after %.1f s", time.monotonic() - started)

    def _capture(self, largest: int) -> None:
        """A graph for each size, the largest first, so that the others find its memory."""
        started = time.monotonic()
        pool: Any = None
        for size in reversed(_sizes(largest)):
            inputs = torch.zeros(3, size, dtype=torch.int32, device=self.device)
            inputs[2] = self._spare_slot
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
        raise UnsupportedModelError(f"the kernels are for compute capability 9.0 and later, not for {torch.cuda.get_device_name()}")
    hf_config = AutoConfig.from_pretrained(config.model, local_files_only=True)
    if set(getattr(hf_config.get_text_config(), "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise UnsupportedModelError(f"{hf_config.model_type} has layers that do not attend to everything")
    with torch.device("meta"):
        if not is_llama_kind(AutoModelForCausalLM.from_config(hf_config)):  # type: ignore[no-untyped-call]
            raise UnsupportedModelError(f"{hf_config.model_type} is not built as Llama is")


class _Graph:
    """A decode step of one size: what it reads and what it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        self.graph, self.inputs, self.logits, self.tokens = graph, inputs, logits, tokens


def _is_prompt(chunk: Chunk) -> bool:
    return chunk.length > 1


def _sizes(largest: int) -> list[int]:
    """Sizes of decode steps that have a graph of their own: 1, 2, 4, then ever wider apart."""
    sizes = [size for size in (1, 2, 4) if size < largest]
    size = 8
    while size < largest:
        sizes.append(size)
        size += next(step for limit, step in _SPACING if size < limit)
    return [*sizes, largest]
