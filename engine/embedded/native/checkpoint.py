"""What a model folder says of a model of the Llama kind, read without transformers; other models are refused.

Vision-language models whose language part is of this kind are taken as well: that part has a configuration and a prefix of its own, and
the vision tower is left where it is.
"""

import json
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.embedded.load import UnsupportedModelError
from engine.prompt import ImageTokens

_KINDS = ("llama", "mistral", "qwen2")
_TOWERS = {
    "llava": r"(model\.)?(vision_tower|multi_modal_projector)\.",
    "idefics3": r"model\.(vision_model|connector)\.",
    "smolvlm": r"model\.(vision_model|connector)\.",
}
"""Kinds of vision-language models, and what the names of tensors that are of no use here begin with."""
_PREFIXES = {
    r"model\.(language|text)_model\.": "model.",
    r"language_model\.model\.": "model.",  # LLaVA's first names, which files still have
    r"language_model\.lm_head\.": "lm_head.",
}
"""What the names of tensors of the language part begin with, and how it is in text models."""
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
"""Of Llama: a text configuration within another tells only what differs."""
_LAYER = "model.layers.{}."
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LINEARS = (*_QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the model, and what else its layers compute with."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    epsilon: float
    rope_theta: float
    eos_token_ids: tuple[int, ...]
    tower: str | None
    """Of a vision-language model: a pattern for the names of tensors that belong to its tower."""
    takes_images: ImageTokens | None


def read_config(folder: Path) -> LlamaConfig:
    """Raises UnsupportedModelError."""
    whole: dict[str, Any] = json.loads((folder / "config.json").read_text())
    tower = _TOWERS.get(whole["model_type"])
    facts = _text_config(whole) if tower else whole
    try:
        _check(facts)
        heads = facts["num_attention_heads"]
        return LlamaConfig(
            layers=facts["num_hidden_layers"],
            hidden=facts["hidden_size"],
            intermediate=facts["intermediate_size"],
            heads=heads,
            kv_heads=facts["num_key_value_heads"],
            head_dim=_head_dim(facts),
            vocab_size=facts["vocab_size"],
            context_length=facts["max_position_embeddings"],
            epsilon=facts["rms_norm_eps"],
            rope_theta=_rope(facts)["rope_theta"],
            eos_token_ids=_eos_token_ids(folder, facts),
            tower=tower,
            takes_images=_image_tokens(whole, facts) if tower else None,
        )
    except KeyError as error:
        raise UnsupportedModelError(f"config.json has no {error.args[0]}") from error


def _text_config(whole: dict[str, Any]) -> dict[str, Any]:
    outer = {name: whole[name] for name in ("quantization_config",) if name in whole}
    facts = {"model_type": "llama", **whole["text_config"], **outer}
    if facts["model_type"] == "llama":
        facts = {**_DEFAULTS, "num_key_value_heads": facts.get("num_attention_heads", 32), **facts}
    return facts


def _image_tokens(whole: dict[str, Any], facts: dict[str, Any]) -> ImageTokens:
    token_id = whole["image_token_id"] if "image_token_id" in whole else whole["image_token_index"]
    return ImageTokens(token_id, facts["hidden_size"])


def _rope(facts: dict[str, Any]) -> dict[str, Any]:
    theta = {"rope_theta": facts["rope_theta"]} if "rope_theta" in facts else {}
    return theta | (facts.get("rope_parameters") or facts.get("rope_scaling") or {})


def _check(facts: dict[str, Any]) -> None:
    rope = _rope(facts)
    sliding = facts["model_type"] == "mistral" and facts.get("sliding_window", 4096) is not None
    refusals = {
        f"the kind {facts['model_type']}": facts["model_type"] not in _KINDS,
        "sliding windows": sliding or facts.get("use_sliding_window") or set(facts.get("layer_types") or ()) - {"full_attention"},
        f"the activation {facts.get('hidden_act')}": facts.get("hidden_act") != "silu",
        "scaled rotary positions": rope.get("rope_type", rope.get("type", "default")) != "default",
        "partly rotated heads": rope.get("partial_rotary_factor", facts.get("partial_rotary_factor", 1.0)) != 1.0,
        "quantised weights": "quantization_config" in facts,
        "heads of an odd size": _head_dim(facts) % 2 != 0,
    }
    if reasons := [reason for reason, refused in refusals.items() if refused]:
        raise UnsupportedModelError(f"the compiled path does not know {', '.join(reasons)}")


def _head_dim(facts: dict[str, Any]) -> int:
    size: int = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    return size


def _eos_token_ids(folder: Path, facts: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    said = json.loads(generation.read_text()) if generation.exists() else {}
    eos = said.get("eos_token_id") or facts.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else ()


class Checkpoint:
    """The tensors of a folder's safetensors, read when asked for. A context manager."""

    def __init__(self, folder: Path, config: LlamaConfig) -> None:
        """Raises UnsupportedModelError unless it has the tensors of this kind of model and no others."""
        self._files = ExitStack()
        self._places: dict[str, tuple[Any, str]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = self._files.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if config.tower is None:
                    self._places[name] = file, name
                elif not re.match(config.tower, name):
                    self._places[_as_in_text_models(name)] = file, name
        names = {name for name in self._places if not name.endswith("rotary_emb.inv_freq")}
        layers = [_LAYER.format(index) for index in range(config.layers)]
        required = {layer + part + ".weight" for layer in layers for part in (*_NORMS, *_LINEARS)}
        required |= {"model.embed_tokens.weight", "model.norm.weight"}
        optional = {layer + part + ".bias" for layer in layers for part in _QKV} | {"lm_head.weight"}
        if wrong := sorted((names ^ required) - optional):
            self._files.close()
            raise UnsupportedModelError(f"the compiled path does not know models with, or without, the tensor {wrong[0]}")

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def is_bfloat16(self) -> bool:
        """Whether every tensor is stored so; others may still be values that bfloat16 holds."""
        return all(file.get_slice(stored).get_dtype() == "BF16" for file, stored in self._places.values())

    def floats(self, name: str) -> torch.Tensor:
        """A tensor as float32."""
        return self._tensor(name).float()

    def weight(self, name: str) -> torch.Tensor:
        """A matrix as bfloat16 [outputs, inputs]. Raises UnsupportedModelError if that would change it."""
        tensor = self._tensor(name)
        narrow = tensor.bfloat16()
        if tensor.dtype != torch.bfloat16 and not torch.equal(narrow.to(tensor.dtype), tensor):
            raise UnsupportedModelError(f"weights are {tensor.dtype}, and bfloat16 would change them")
        return narrow.contiguous()

    def _tensor(self, name: str) -> torch.Tensor:
        file, stored = self._places[name]
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor


def _as_in_text_models(name: str) -> str:
    for prefix, plain in _PREFIXES.items():
        if found := re.match(prefix, name):
            return plain + name[found.end() :]
    return name
