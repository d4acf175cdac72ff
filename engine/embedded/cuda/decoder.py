"""Decoder layers of the Llama kind on a GPU: joined products, Triton kernels between them, the residual stream changed in place."""

from typing import Any

import torch
from torch.nn import functional

from engine.embedded.attention import KvCache
from engine.embedded.cuda import kernels
from engine.embedded.cuda.attention import CudaAttention, Step
from engine.embedded.cuda.products import MAX_ROWS, Product, fits_product
from engine.embedded.decoder import has_parts, values_of_first_head

# Rows of the weight and columns for each program, and its warps, measured on an H200 (benchmarks/kernels.py, docs/log.md).
_TILES = {"qkv": (4, 2048, 8), "out": (16, 512, 4), "gate_up": (2, 2048, 4), "down": (8, 1024, 4), "head": (8, 1024, 4)}

_FEW_ROWS = range(33, MAX_ROWS + 1)
"""Rows for which our own products beat cuBLAS's; below, its tiles fit better."""
_FEW_TILES = {"out": (64, 128, 2, 4, 4), "gate_up": (64, 64, 1, 3, 4), "down": (64, 128, 2, 4, 4)}
_TRIAL = 9


class _Layer:
    """The weights of one layer, joined."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm = layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon
        self.mlp_norm = layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon
        self.qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _joined(attention.o_proj)
        self.gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self.down = _joined(mlp.down_proj)


class LlamaDecoder:
    """All layers of a transformers model of the Llama kind, over flat tokens. Takes the weights out of the model's own layers."""

    def __init__(self, model: Any, attention: CudaAttention, context_length: int) -> None:
        inner, first = model.model, model.model.layers[0].self_attn
        dim = first.head_dim
        self.scale: float = first.scaling
        self._heads = first.q_proj.out_features // dim, first.k_proj.out_features // dim, dim
        self.attention = attention
        self._embedding = inner.embed_tokens.weight
        self._norm = inner.norm.weight, inner.norm.variance_epsilon
        self._head = model.get_output_embeddings().weight
        self._rotations = _rotations(inner.rotary_emb, context_length, self._embedding.device)
        width = self._heads[0] * dim
        self._product = Product(self._embedding.device)
        self._fetch = not width & (width - 1)
        self._layers = []
        for index in range(len(inner.layers)):
            self._layers.append(_Layer(inner.layers[index]))
            inner.layers[index] = torch.nn.Identity()

    def load_products(self, max_rows: int) -> None:
        """Have cuBLAS load its kernels for as many rows as steps of prompts have, which costs tens of milliseconds each."""
        layer = self._layers[0]
        for rows in range(256, max_rows + 1, 256):
            for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
                functional.linear(weight.new_zeros((rows, weight.shape[1])), weight)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, step: Step, rows: torch.Tensor | None) -> torch.Tensor:
        """Logits [rows, vocab] of these flat rows, all of them if None. `tokens` and `positions`: int [tokens]."""
        x = functional.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            attended = self._attend(x, index, layer, positions, step)
            if rows is not None and index == len(self._layers) - 1:  # nothing else of the last layer is looked at
                x, attended = x[rows], attended[rows]
            self._add(x, attended, layer.out, "out")
            self._add(x, self._gated(x, layer), layer.down, "down")
        if len(x) == 1:
            return kernels.gemv(x, self._head, norm=self._norm, tile=_TILES["head"])
        return functional.linear(kernels.rms_norm(x, *self._norm), self._head)

    def _attend(self, x: torch.Tensor, index: int, layer: _Layer, positions: torch.Tensor, step: Step) -> torch.Tensor:
        heads, kv_heads, dim = self._heads
        if len(x) == 1:
            qkv = kernels.gemv(x, layer.qkv, norm=layer.norm, tile=_TILES["qkv"])
        else:
            qkv = functional.linear(kernels.rms_norm(x, *layer.norm), layer.qkv)
        keys, values = self.attention.layer(index)
        query = kernels.rotate_and_store(qkv, self._heads, self._rotations, positions, step.rows, keys, values)
        key, value = qkv.view(len(x), -1, dim)[:, heads:].split(kv_heads, 1)  # type: ignore[no-untyped-call]
        return self.attention(step, index, query, key, value).flatten(1)

    def _gated(self, x: torch.Tensor, layer: _Layer) -> torch.Tensor:
        """silu(gate) · up of the normalised x."""
        if len(x) == 1:
            return kernels.gemv(x, layer.gate_up, norm=layer.mlp_norm, gated=True, tile=_TILES["gate_up"])
        normed = kernels.rms_norm(x, *layer.mlp_norm)
        if len(x) in _FEW_ROWS and fits_product(layer.gate_up):
            return self._product(normed, layer.gate_up, _FEW_TILES["gate_up"], gated=True)
        return kernels.silu_mul(functional.linear(normed, layer.gate_up))

    def _add(self, x: torch.Tensor, value: torch.Tensor, weight: torch.Tensor, name: str) -> None:
        """x += value · weightᵀ, in place."""
        if len(x) == 1:
            kernels.gemv(value, weight, residual=x, fetch=name == "out" and self._fetch, tile=_TILES[name])
        elif len(x) in _FEW_ROWS and fits_product(weight):
            self._product(value, weight, _FEW_TILES[name], residual=x)
        else:
            torch.addmm(x, value, weight.t(), out=x)


def is_llama_kind(model: Any) -> bool:
    """Whether the parts are those that `LlamaDecoder` knows, without biases; `trial` shows the rest."""
    inner = getattr(model, "model", None)
    if inner is None or not {"embed_tokens", "layers", "norm", "rotary_emb"} <= {name for name, _ in inner.named_children()}:
        return False
    dim = inner.layers[0].self_attn.head_dim
    if dim & (dim - 1):
        return False
    for layer in inner.layers:
        if not has_parts(layer) or any(name.endswith("bias") for name, _ in layer.named_parameters()):
            return False
        if not all(kernels.fits_gemv(linear.weight) for linear in layer.modules() if isinstance(linear, torch.nn.Linear)):
            return False
    return True


class _Stub:
    """In the place of attention: something that depends on all of its arguments."""

    def __init__(self, cache: KvCache, scale: float) -> None:
        self._cache, self._scale = cache, scale

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.data[:, index, 0], self._cache.data[:, index, 1]

    def __call__(self, step: Step, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return values_of_first_head(layer, query, key, value, self._scale)


def trial_by_transformers(model: Any) -> torch.Tensor:
    """The model's own logits of some tokens, with a stub in the place of attention: float32 [tokens, vocab]."""
    device = model.get_output_embeddings().weight.device
    tokens = torch.arange(1, 1 + _TRIAL, device=device).unsqueeze(0)
    logits: torch.Tensor = model(input_ids=tokens, position_ids=tokens, use_cache=False, paged=values_of_first_head).logits
    return logits[0].float()


def trial(decoder: LlamaDecoder, cache: KvCache) -> torch.Tensor:
    """The same by `decoder`: the first token alone, as a decode step has it, then the others."""
    real, stub = decoder.attention, _Stub(cache, decoder.scale)
    decoder.attention = stub  # type: ignore[assignment]
    tokens = torch.arange(1, 1 + _TRIAL, device=cache.data.device, dtype=torch.int32)
    spare = (len(cache.data) - 1) * cache.layers * 2 * cache.block_size
    parts = []
    for part in (tokens[:1], tokens[1:]):
        rows = torch.arange(len(part), device=cache.data.device) + spare
        step = Step(rows, len(part), part, part, None)
        parts.append(decoder(part.long(), part, step, None).float())
    decoder.attention = real
    return torch.cat(parts)


def _joined(*linears: Any) -> torch.Tensor:
    return torch.cat([linear.weight for linear in linears]).detach() if len(linears) > 1 else linears[0].weight.detach()


def _rotations(rotary: Any, context_length: int, device: torch.device) -> torch.Tensor:
    """Cosines of half a head, then sines, for every position: float32 [positions, head_dim]."""
    positions = torch.arange(context_length, device=device).unsqueeze(0)
    cos, sin = rotary(torch.zeros(1, device=device), positions)
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).contiguous()
