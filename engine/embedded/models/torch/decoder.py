"""A decoder layer of the Llama kind on a CPU, in some thirty operations.

transformers' own takes a hundred and as many Python calls, and a step of one token is bound by their number
(docs/log.md). Layers that compute something else are left as they are.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.embedded.models.torch.attention import AttentionBackend
from engine.embedded.models.torch.linear import is_float32_linear, pack_joined
from engine.embedded.models.torch.norm import RmsNorm

_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}

Rotation = tuple[torch.Tensor, torch.Tensor]


class _SignedRotation:
    """A step's cosines and sines as the layers need them, made by the first layer that asks: each [tokens, 1,
    head_dim]."""

    def __init__(self) -> None:
        self._source: Rotation | None = None
        self._made: Rotation

    def of(self, source: Rotation) -> Rotation:
        """Return cosines and sines from transformers' [1, tokens, head_dim]; the sines of the first half are
        negative, as they meet the second half's values."""
        if self._source is not source:
            cos, sin = source[0][0].unsqueeze(1), source[1][0].unsqueeze(1)
            half = sin.shape[-1] // 2
            self._source = source
            self._made = cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return self._made


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + down(silu(gate(norm(x))) · up(norm(x))), with rotary positions."""

    def __init__(self, layer: Any, rotation: _SignedRotation) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = attention.layer_idx
        self._scale = attention.scaling
        self._head_dim = attention.head_dim
        self._heads = attention.q_proj.out_features // self._head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self._qkv = pack_joined([attention.q_proj, attention.k_proj, attention.v_proj]).forward
        self._out = pack_joined([attention.o_proj]).forward
        self._gate_up = pack_joined([mlp.gate_proj, mlp.up_proj]).forward
        self._down = pack_joined([mlp.down_proj]).forward
        self._attention_norm = layer.input_layernorm.forward
        self._mlp_norm = layer.post_attention_layernorm.forward
        self._rotation = rotation

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: Rotation, paged: AttentionBackend, **_: Any
    ) -> torch.Tensor:
        """`hidden_states` [1, tokens, hidden]; further arguments are those that transformers passes and this does
        without."""
        x = hidden_states[0]
        cos, sin = self._rotation.of(position_embeddings)
        heads = self._qkv(self._attention_norm(x)).view(len(x), -1, self._head_dim)
        turned, value = torch.split_with_sizes(heads, (self._heads + self._kv_heads, self._kv_heads), 1)
        turned = torch.addcmul(turned * cos, turned.roll(self._head_dim // 2, -1), sin)
        query, key = torch.split_with_sizes(turned, (self._heads, self._kv_heads), 1)
        attended = paged(self._index, query, key, value, self._scale)
        x = self._out(attended.flatten(1)).add_(x)
        gate, up = self._gate_up(self._mlp_norm(x)).chunk(2, -1)
        return self._down(functional.silu(gate).mul_(up)).add_(x).unsqueeze(0)


def replacements(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield functions that replace the model's layers, if they are of this kind: each lays out the weights of one."""
    rotation = _SignedRotation()
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and all(map(_is_replaceable, layers)) and _computes_the_same(layers[0]):
            yield from (partial(_replace, layers, index, rotation) for index in range(len(layers)))


def _replace(layers: nn.ModuleList, index: int, rotation: _SignedRotation) -> None:
    layers[index] = DecoderLayer(layers[index], rotation)


def has_parts(layer: nn.Module) -> bool:
    """Return whether the layer's modules have the names that Llama's have."""
    return all(
        {name for name, _ in layer.get_submodule(path).named_children()} == names for path, names in _PARTS.items()
    )


def _is_replaceable(layer: nn.Module) -> bool:
    if not has_parts(layer):
        return False
    modules = dict(layer.named_modules())
    linears = [modules[name] for name in modules if name.endswith("_proj")]
    norms = [modules["input_layernorm"], modules["post_attention_layernorm"]]
    return all(map(is_float32_linear, linears)) and all(isinstance(norm, RmsNorm) for norm in norms)


def _computes_the_same(layer: Any) -> bool:
    """Return whether a layer computes what `DecoderLayer` does, by trial: models of other kinds can have parts of
    the same names."""
    with torch.inference_mode():
        try:
            mine = DecoderLayer(layer, _SignedRotation())
            hidden = torch.linspace(-1, 1, 3 * layer.self_attn.q_proj.in_features).sin().view(1, 3, -1)
            angles = torch.linspace(0, 1, 3 * mine._head_dim // 2).view(1, 3, -1).repeat(1, 1, 2)
            arguments = {"position_embeddings": (angles.cos(), angles.sin()), "paged": values_of_first_head}
            expected = layer(hidden, attention_mask=None, **arguments)
            return torch.allclose(
                mine(hidden, **arguments), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
            )
        except (AttributeError, RuntimeError, TypeError):
            return False


def values_of_first_head(
    _: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, **__: Any
) -> torch.Tensor:
    """Return something that depends on queries, keys, values and the scale, in place of attention."""
    return query * scale + key[:, :1] + value[:, :1]
