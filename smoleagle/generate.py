"""Texts that the target itself writes, thousands at a time: the head learns to guess what this model says."""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from smoleagle.prompts import prompt

_END = "<|im_end|>"
_KINDS = ("llama", "qwen2")
TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.3, 0.5, 0.7, 1.0)
_ASKING = 0.8
"""Temperature of the text that the model writes for the user."""


class Writer:
    """Samples a batch token by token: prompts are read in the same steps, so every row is at the same position. On a
    GPU a step is a CUDA graph.

    The model is one of Llama's or Qwen2's, with turns in ChatML. `system`: text that its template puts before chats.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, rows: int, length: int, system: str) -> None:
        if model.config.model_type not in _KINDS:
            raise SystemExit(f"the base is of the type {model.config.model_type}, not {' or '.join(_KINDS)}")
        end = tokenizer.token_to_id(_END)
        if end is None:
            raise SystemExit(f"the base's tokenizer has no {_END}: texts are chats in ChatML")
        self._model, self._tokenizer, self._end, self._system = model.model, tokenizer, end, system
        self._outputs = model.get_output_embeddings().weight
        self._rows, self._length = rows, length
        config, self._device = model.config, model.device
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = config.hidden_size // self._heads
        shape = config.num_hidden_layers, 2, rows, self._kv_heads, length, self._dim
        self._cache = torch.zeros(shape, dtype=model.dtype, device=self._device)
        places = torch.arange(length, device=self._device)[None]
        cos, sin = self._model.rotary_emb(self._cache[:1, 0, 0, 0], places)
        self._cos, self._sin = cos[0], sin[0]
        self._tokens = torch.zeros((rows, length), dtype=torch.int64, device=self._device)
        self._given = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._temperatures = torch.zeros((rows, 1), device=self._device)
        self._answering = torch.zeros((rows, 1), device=self._device)
        """Temperature after the user's turn has ended."""
        self._at = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._device.type == "cuda":
            self._capture()

    def write(self, seed: int, held_out: bool = False, temperatures: tuple[float, ...] = TEMPERATURES) -> "Texts":
        """Return a batch of texts for prompts of this seed."""
        rng = random.Random(f"{seed} {held_out}")
        asked = [prompt(rng, held_out, self._system) for _ in range(self._rows)]
        turns = [2 if text.endswith("user\n") else 1 for text in asked]
        prompts = [self._tokenizer.encode(text, add_special_tokens=False).ids[: self._length - 1] for text in asked]
        given = torch.zeros((self._rows, self._length), dtype=torch.int64)
        for row, ids in enumerate(prompts):
            given[row, : len(ids)] = torch.tensor(ids)
        chosen = torch.tensor([rng.choice(temperatures) for _ in turns])
        asking = torch.tensor([_ASKING if turn == 2 else 0.0 for turn in turns])
        with torch.no_grad():
            self._tokens.copy_(given)
            self._given.copy_(torch.tensor([len(ids) for ids in prompts]))
            self._answering.copy_(chosen[:, None])
            self._temperatures.copy_(torch.where(asking > 0, asking, chosen)[:, None])
            self._at.zero_()
            for _ in range(self._length - 1):
                self._graph.replay() if self._graph is not None else self._step()
            tokens, lengths = self._tokens.clone(), self._given.clone()
        places = torch.arange(self._length, device=self._device)
        written = places >= lengths[:, None]
        ends = (tokens == self._end) & written
        earlier = ends.cumsum(1) - ends.long()
        return Texts(tokens, written & (earlier < torch.tensor(turns, device=self._device)[:, None]))

    @torch.no_grad()
    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            print(f"no CUDA graph ({error}): texts are written more slowly", flush=True)
        else:
            self._graph = graph

    def _step(self) -> None:
        """Compute one position of every row, and write the next token unless it is given."""
        model, rows, at, dim = self._model, self._rows, self._at, self._dim
        x = functional.embedding(self._tokens.index_select(1, at)[:, 0], model.embed_tokens.weight)
        cos, sin = self._cos.index_select(0, at), self._sin.index_select(0, at)
        seen = (torch.arange(self._length, device=self._device) <= at)[None, None, None]
        for layer, (keys, values) in zip(model.layers, self._cache, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            query = _turned(attention.q_proj(normed).view(rows, self._heads, dim), cos, sin)
            key = _turned(attention.k_proj(normed).view(rows, self._kv_heads, dim), cos, sin)
            keys.index_copy_(2, at, key[:, :, None])
            values.index_copy_(2, at, attention.v_proj(normed).view(rows, self._kv_heads, 1, dim))
            grouped = query.view(rows, self._kv_heads, -1, dim)  # the queries of a key head side by side
            found = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen)
            x = x + attention.o_proj(found.reshape(rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = functional.linear(model.norm(x), self._outputs).float()
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_().neg_()
        drawn = (logits + self._temperatures * noise).argmax(1)
        following = at + 1
        given = following < self._given
        ends = ((drawn == self._end) & ~given)[:, None]
        self._temperatures.copy_(torch.where(ends, self._answering, self._temperatures))
        present = self._tokens.index_select(1, following)[:, 0]
        self._tokens.index_copy_(1, following, torch.where(given, present, drawn)[:, None])
        at.add_(1)


class Texts:
    """Tokens [texts, length], and which of them the model wrote, up to the end of its turn."""

    def __init__(self, tokens: torch.Tensor, written: torch.Tensor) -> None:
        self.tokens = tokens
        self.written = written


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
