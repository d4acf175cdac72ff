"""Decoder layers of the Llama kind on a GPU: joined products, Triton kernels between them, the residual stream
changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from engine.embedded.models.cuda import kernels
from engine.embedded.models.cuda.attention import AttentionStep, CudaAttention
from engine.embedded.models.cuda.fp8 import Fp8Products
from engine.embedded.models.cuda.weights import Norm, PlainProducts, Products, Weight
from engine.embedded.models.torch.attention import KvCache
from engine.embedded.models.torch.decoder import has_parts, values_of_first_head

_HEAD_TILE = (8, 1024, 4)
_TRIAL = 9


class _JoinedLayer:
    """The weights of one layer, joined."""

    def __init__(self, layer: Any, products: Products) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm: Norm = (layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
        self.mlp_norm: Norm = (layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon)
        self.qkv = _joined(products, "qkv", attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _joined(products, "out", attention.o_proj)
        self.gate_up = _joined(products, "gate_up", mlp.gate_proj, mlp.up_proj)
        self.down = _joined(products, "down", mlp.down_proj)

    def convert(self, products: Products) -> None:
        """Convert the weights for other products, in place."""
        for name in ("qkv", "out", "gate_up", "down"):
            weight: Weight = getattr(self, name)
            setattr(self, name, products.join(weight.name, [weight.values]))

    def move(self, place: Place) -> None:
        self.norm = place(self.norm[0]), self.norm[1]
        self.mlp_norm = place(self.mlp_norm[0]), self.mlp_norm[1]
        for name in ("qkv", "out", "gate_up", "down"):
            weight: Weight = getattr(self, name)
            scales = None if weight.scales is None else place(weight.scales)
            setattr(self, name, Weight(weight.name, place(weight.values), scales))


Place = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor of the same shape and type, elsewhere."""


class LlamaDecoder:
    """All layers of a transformers model of the Llama kind, over flat tokens. Takes the weights out of the model's own
    layers.

    `most_shown`: maximum number of embeddings that can replace those of tokens at a time. They lie behind those of the
    vocabulary, as if they were of more tokens, so that a CUDA graph takes them too.
    """

    def __init__(
        self, model: Any, context_length: int, most_shown: int = 0, device: torch.device | None = None
    ) -> None:
        """`device`: where the decoder computes, if the model's weights are not there yet."""
        inner = model.get_decoder()
        first = inner.layers[0].self_attn
        dim = first.head_dim
        self.scale: float = first.scaling
        self.heads = first.q_proj.out_features // dim, first.k_proj.out_features // dim, dim
        self.vocabulary = len(inner.embed_tokens.weight)
        self._embedding = _extended(inner.embed_tokens.weight, most_shown)
        self._norm: Norm = (inner.norm.weight, inner.norm.variance_epsilon)
        head = model.get_output_embeddings().weight
        self._tied = head is inner.embed_tokens.weight
        self._head = self._embedding[: self.vocabulary] if self._tied else head
        device = device or self._embedding.device
        self._rotations = _rotations(inner.rotary_emb, context_length, device)
        width = self.heads[0] * dim
        self._fetch = not width & (width - 1)
        self._products: Products = PlainProducts(self._fetch, device)
        self.taken: tuple[int, ...] = ()
        """Layers whose inputs are kept in `hidden`."""
        self.hidden: torch.Tensor | None = None
        self._layers = []
        for index in range(len(inner.layers)):
            self._layers.append(_JoinedLayer(inner.layers[index], self._products))
            inner.layers[index] = torch.nn.Identity()

    def quantise(self) -> None:
        """Convert the weights to eight bits, layer by layer: no more than one layer is in memory twice."""
        self._products = Fp8Products(self._fetch)
        for layer in self._layers:
            layer.convert(self._products)

    def move(self, place: Place) -> None:
        """Have the weights elsewhere: `place` is called with each tensor, always in the same order."""
        self._embedding = place(self._embedding)
        self._head = self._embedding[: self.vocabulary] if self._tied else place(self._head)
        self._norm = place(self._norm[0]), self._norm[1]
        for layer in self._layers:
            layer.move(place)

    def load_products(self, max_rows: int, max_sampled: int) -> None:
        """Have cuBLAS load its kernels for as many rows as steps of prompts have, and as are sampled from after these,
        which costs tens of milliseconds each."""
        layer = self._layers[0]
        for rows in range(256, max_rows + 1, 256):
            for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
                self._products.load(weight, rows)
        for rows in (*range(2, 32, 2), *range(32, max_sampled + 1, 8)):
            for weight in (layer.out, layer.gate_up, layer.down):
                self._products.load(weight, rows)
            functional.linear(self._head.new_zeros((rows, self._head.shape[1])), self._head)

    def show(self, embeddings: torch.Tensor) -> None:
        """Set the embeddings, [rows, hidden size], that token ids from `vocabulary` on stand for."""
        self._embedding[self.vocabulary : self.vocabulary + len(embeddings)] = embeddings

    @property
    def output(self) -> torch.Tensor:
        """The output rows, [vocabulary, hidden size]."""
        return self._head

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, [tokens, hidden size], of token ids, int [tokens]."""
        return functional.embedding(tokens, self._embedding)

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: CudaAttention | _Stub,
        step: AttentionStep,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the logits [rows, vocab] of these flat rows, of all rows if None. `x`: the tokens' embeddings,
        [tokens, hidden size], which are changed in place; `positions`: int [tokens]."""
        products, norms = self._products, [layer.norm for layer in self._layers]
        normed = products.norm(x, norms[0])
        entered: dict[int, torch.Tensor] = {}
        for index, (layer, following) in enumerate(zip(self._layers, [*norms[1:], None], strict=True)):
            if index in self.taken:
                entered[index] = x.clone()
                if index == max(self.taken):
                    self.hidden = torch.cat([entered[taken] for taken in self.taken], -1)
            attended = self._attend(products.product(normed, layer.qkv), index, positions, attention, step)
            if rows is not None and following is None:  # nothing else of the last layer is looked at
                if not len(rows):
                    return x.new_empty((0, len(self._head)))
                x, attended = x[rows], attended[rows]
            normed = products.add(x, attended, layer.out, layer.mlp_norm)
            normed = products.add_gated(x, normed, layer.gate_up, layer.down, following)
        if len(x) == 1:
            return kernels.gemv(x, self._head, norm=self._norm, tile=_HEAD_TILE)
        return functional.linear(kernels.rms_norm(x, *self._norm), self._head)

    def _attend(
        self,
        qkv: torch.Tensor,
        index: int,
        positions: torch.Tensor,
        attention: CudaAttention | _Stub,
        step: AttentionStep,
    ) -> torch.Tensor:
        heads, kv_heads, dim = self.heads
        keys, values = attention.layer(index)
        query = kernels.rotate_and_store(qkv, self.heads, self._rotations, positions, step.rows, keys, values)
        key, value = qkv.view(len(qkv), -1, dim)[:, heads:].split(kv_heads, 1)  # type: ignore[no-untyped-call]
        return attention(step, index, query, key, value).flatten(1)


def is_llama_kind(model: Any) -> bool:
    """Return whether a model has the parts that `LlamaDecoder` knows, without biases; `trial` shows the rest."""
    inner = model.get_decoder()
    if not {"embed_tokens", "layers", "norm", "rotary_emb"} <= {name for name, _ in inner.named_children()}:
        return False
    dim = inner.layers[0].self_attn.head_dim
    if dim & (dim - 1):
        return False
    for layer in inner.layers:
        if not has_parts(layer) or any(name.endswith("bias") for name, _ in layer.named_parameters()):
            return False
        if not all(
            kernels.fits_gemv(linear.weight) for linear in layer.modules() if isinstance(linear, torch.nn.Linear)
        ):
            return False
    return True


class _Stub:
    """A stand-in for attention whose result depends on all of its arguments."""

    def __init__(self, decoder: LlamaDecoder, dtype: torch.dtype, device: torch.device) -> None:
        _, kv_heads, dim = decoder.heads
        self._cache = KvCache(torch.zeros((1, 1, 2, _TRIAL, kv_heads, dim), dtype=dtype, device=device))
        self._scale = decoder.scale

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.data[:, 0, 0], self._cache.data[:, 0, 1]

    def __call__(
        self, step: AttentionStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return values_of_first_head(layer, query, key, value, self._scale)


def trial_by_transformers(model: Any) -> torch.Tensor:
    """Return the model's own logits of some tokens, float32 [tokens, vocab], with a stub in place of attention."""
    device = model.get_output_embeddings().weight.device
    tokens = torch.arange(1, 1 + _TRIAL, device=device).unsqueeze(0)
    logits: torch.Tensor = model(
        input_ids=tokens, position_ids=tokens, use_cache=False, paged=values_of_first_head
    ).logits
    return logits[0].float()


def trial(decoder: LlamaDecoder, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the same logits computed by `decoder`, with a KV cache of this type: the first token alone, as in a
    decode step, then the others."""
    stub = _Stub(decoder, dtype, device)
    tokens = torch.arange(1, 1 + _TRIAL, device=device, dtype=torch.int32)
    parts = []
    for part in (tokens[:1], tokens[1:]):
        rows = torch.arange(len(part), device=device)
        parts.append(
            decoder(
                decoder.embed(part.long()), part, stub, AttentionStep(rows, len(part), part, part, None), None
            ).float()
        )
    return torch.cat(parts)


def _joined(products: Products, name: str, *linears: Any) -> Weight:
    return products.join(name, [linear.weight.detach() for linear in linears])


def _extended(embedding: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((embedding, embedding.new_zeros((rows, embedding.shape[1])))) if rows else embedding


def _rotations(rotary: Any, context_length: int, device: torch.device) -> torch.Tensor:
    """Return the cosines of half a head, then the sines, for every position: float32 [positions, head_dim]."""
    positions = torch.arange(context_length, device=device).unsqueeze(0)
    cos, sin = rotary(torch.zeros(1, device=device), positions)
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).contiguous()
