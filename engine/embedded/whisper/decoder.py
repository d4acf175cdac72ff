"""Whisper's decoder: from tokens, and the speech that was encoded beside them, to logits.

Sequences have places in one cache. Those that run have the first places, so that a step reads their keys and values
where they are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from engine.checkpoints.whisper import WhisperSizes
from engine.embedded.whisper.encoder import FeedForward, Linear, Norm, Weights, join_heads, missing_tensors, split_heads


class Caches(NamedTuple):
    """Keys and values of all layers and places. Memory of a CPU is taken when it is written."""

    own: torch.Tensor
    """[layers, 2, places, heads, context, size]: of a sequence's tokens."""
    speech: torch.Tensor
    """[layers, 2, places, heads, positions, size]: of the speech that it attends to."""

    @classmethod
    def empty(cls, sizes: WhisperSizes, places: int, dtype: torch.dtype, device: torch.device) -> "Caches":
        shape = (sizes.decoder_layers, 2, places, sizes.decoder_heads)
        size = sizes.width // sizes.decoder_heads
        own, speech = (
            torch.zeros((*shape, length, size), dtype=dtype, device=device)  # finite where masks hide it
            for length in (sizes.context, sizes.positions)
        )
        return cls(own, speech)

    @property
    def places(self) -> int:
        return self.own.shape[2]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a sequence of `length` tokens to another place."""
        self.own[:, :, target, :, :length] = self.own[:, :, source, :, :length]
        self.speech[:, :, target] = self.speech[:, :, source]


class _SpeechLayer:
    def __init__(self, weights: Weights, prefix: str, heads: int) -> None:
        own, speech = f"{prefix}.self_attn", f"{prefix}.encoder_attn"
        self._heads = heads
        self._own_norm = Norm.of(weights, f"{own}_layer_norm")
        self._own_inputs = Linear.of(weights, *(f"{own}.{part}_proj" for part in "qkv"))
        self._own_output = Linear.of(weights, f"{own}.out_proj")
        self._speech_norm = Norm.of(weights, f"{speech}_layer_norm")
        self._speech_query = Linear.of(weights, f"{speech}.q_proj")
        self._speech_inputs = Linear.of(weights, f"{speech}.k_proj", f"{speech}.v_proj")
        self._speech_output = Linear.of(weights, f"{speech}.out_proj")
        self._feed_forward = FeedForward(weights, prefix)

    def hear(self, encoded: torch.Tensor, cache: torch.Tensor) -> None:
        """Write keys and values of encoded speech [n, positions, width] to [2, n, heads, positions, size]."""
        for part, values in enumerate(self._speech_inputs(encoded).chunk(2, -1)):
            cache[part] = split_heads(values, self._heads)

    def __call__(
        self,
        x: torch.Tensor,
        own: torch.Tensor,
        speech: torch.Tensor,
        where: torch.Tensor,
        length: int,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the queries to the speech. `where` is [n, t]: positions of the tokens."""
        q, k, v = (split_heads(part, self._heads) for part in self._own_inputs(self._own_norm(x)).chunk(3, -1))
        rows = torch.arange(len(x), device=x.device)[:, None]
        own[0][rows, :, where] = k.transpose(1, 2)
        own[1][rows, :, where] = v.transpose(1, 2)
        keys, values = own[0][:, :, :length], own[1][:, :, :length]
        heard = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self._own_output(join_heads(heard))
        query = split_heads(self._speech_query(self._speech_norm(x)), self._heads)
        x = x + self._speech_output(join_heads(functional.scaled_dot_product_attention(query, speech[0], speech[1])))
        return self._feed_forward(x), query


class SpeechDecoder:
    """The decoder of one model, on the device and in the type of its weights, which are named as in Whisper's files
    behind `model.decoder.`. Raises EngineFailure if one is missing."""

    def __init__(self, weights: Weights, sizes: WhisperSizes) -> None:
        self.sizes = sizes
        with missing_tensors("model.decoder."):
            self._embeddings = weights["embed_tokens.weight"]
            self._positions = weights["embed_positions.weight"]
            layers = range(sizes.decoder_layers)
            self._layers = [_SpeechLayer(weights, f"layers.{number}", sizes.decoder_heads) for number in layers]
            self._norm = Norm.of(weights, "layer_norm")

    def hear(self, encoded: torch.Tensor, caches: Caches, first: int) -> None:
        """Have the sequences from place `first` on attend to encoded speech, [n, positions, width]."""
        for layer, cache in zip(self._layers, caches.speech, strict=True):
            layer.hear(encoded, cache[:, first : first + len(encoded)])

    def __call__(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        caches: Caches,
        first: int,
        rows: Sequence[int] = (-1,),
    ) -> torch.Tensor:
        """Compute the next tokens, equally many, of the sequences from place `first` on, whose first ones are at
        positions `starts`. Return the float32 logits behind some of them: [n, len(rows), vocabulary]."""
        x, _ = self._compute(tokens, starts, caches, first)
        return functional.linear(self._norm(x[:, [*rows]]), self._embeddings).float()

    def attention(
        self, tokens: Sequence[int], caches: Caches, place: int, heads: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Return how much each token of a whole sequence attends to each position of the speech, in some heads, given
        as pairs of layer and head: float32 [heads, tokens, positions]."""
        _, queries = self._compute([tokens], [0], caches, place)
        found = []
        for layer, head in heads:
            query, keys = queries[layer][0, head].float(), caches.speech[layer, 0, place, head].float()
            found.append((query @ keys.T / query.shape[-1] ** 0.5).softmax(-1))
        return torch.stack(found)

    def _compute(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], caches: Caches, first: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        device = self._embeddings.device
        ids = torch.tensor(tokens, device=device)
        count, new = ids.shape
        length = max(starts) + new
        where = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
        mask = None
        if new > 1 or min(starts) != max(starts):
            mask = (torch.arange(length, device=device) <= where[:, :, None])[:, None]
        x = self._embeddings[ids] + self._positions[where]
        queries = []
        places = slice(first, first + count)
        for layer, own, speech in zip(self._layers, caches.own, caches.speech, strict=True):
            x, query = layer(x, own[:, places], speech[:, places], where, length, mask)
            queries.append(query)
        return x, queries
