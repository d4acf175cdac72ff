"""The table of GGUF architectures: how their tensors and settings are named in a Hugging Face folder.

llama.cpp's converter renames tensors, changes some of them, keeps the configuration as metadata, and leaves what all
models of an architecture share to llama.cpp's code (src/models/ and src/llama-model.cpp there).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engine.checkpoints.gguf.file import GgufFile
from engine.errors import EngineFailure

Settings = dict[str, Any]
"""The contents of a config.json."""


class Part(NamedTuple):
    """A tensor of the model."""

    name: str
    """Name of the tensor in the model folder."""
    shape: tuple[str, ...]
    """Names of sizes, see `GgufModel.sizes`."""
    optional: bool = False


_HIDDEN = ("hidden",)
_TOP = {
    "token_embd.weight": Part("model.embed_tokens.weight", ("vocabulary", "hidden")),
    "output_norm.weight": Part("model.norm.weight", _HIDDEN),
    "output.weight": Part("lm_head.weight", ("vocabulary", "hidden"), optional=True),  # tied if it is not there
}
_LAYER = {
    "attn_norm.weight": Part("input_layernorm.weight", _HIDDEN),
    "attn_q.weight": Part("self_attn.q_proj.weight", ("queries", "hidden")),
    "attn_k.weight": Part("self_attn.k_proj.weight", ("keys", "hidden")),
    "attn_v.weight": Part("self_attn.v_proj.weight", ("keys", "hidden")),
    "attn_output.weight": Part("self_attn.o_proj.weight", ("hidden", "queries")),
    "ffn_norm.weight": Part("post_attention_layernorm.weight", _HIDDEN),
    "ffn_gate.weight": Part("mlp.gate_proj.weight", ("inner", "hidden")),
    "ffn_up.weight": Part("mlp.up_proj.weight", ("inner", "hidden")),
    "ffn_down.weight": Part("mlp.down_proj.weight", ("hidden", "inner")),
}
_BIASES = {
    "attn_q.bias": Part("self_attn.q_proj.bias", ("queries",)),
    "attn_k.bias": Part("self_attn.k_proj.bias", ("keys",)),
    "attn_v.bias": Part("self_attn.v_proj.bias", ("keys",)),
}
_HEAD_NORMS = {
    "attn_q_norm.weight": Part("self_attn.q_norm.weight", ("head",)),
    "attn_k_norm.weight": Part("self_attn.k_norm.weight", ("head",)),
}
_SANDWICH = {
    "post_attention_norm.weight": Part("post_attention_layernorm.weight", _HIDDEN),
    "ffn_norm.weight": Part("pre_feedforward_layernorm.weight", _HIDDEN),
    "post_ffw_norm.weight": Part("post_feedforward_layernorm.weight", _HIDDEN),
}
_ROPE_FACTORS = "rope_freqs.weight"
_GEMMA_PATTERN = 6
"""Every sixth layer has full attention, unless the file says otherwise."""
_GEMMA_LOCAL_THETA = 10000.0
_GEMMA_27B = 62
"""Layers of the one size whose attention is not scaled by the size of its heads (llama.cpp, src/models/gemma3.cpp)."""


class GgufModel:
    """One file as a model of its family: its configuration, and the tensors that it must have."""

    def __init__(self, file: GgufFile) -> None:
        """Raises EngineFailure for an architecture, a setting or a tensor that is not supported, or not there."""
        self.file = file
        self.architecture = self._text("general.architecture")
        if self.architecture not in GGUF_FAMILIES:
            raise EngineFailure(
                f"{file.path} has the architecture {self.architecture}; supported are {', '.join(GGUF_FAMILIES)}"
            )
        self.family = GGUF_FAMILIES[self.architecture]
        if self.value("expert_count", 0):
            raise EngineFailure(f"{file.path} has {self.value('expert_count')} experts, and mixtures are not supported")
        self.tied = "output.weight" not in file.tensors
        self.sizes = self._sizes()
        self.parts = self._parts()
        self._check_tensors()

    def value(self, key: str, default: Any = None) -> Any:
        """Return a setting of the architecture. Raises EngineFailure if it is missing and has no default."""
        found = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise EngineFailure(f"{self.file.path} lacks {self.architecture}.{key} in its metadata")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, as the shortest decimal of its float32: 1e-05 for 9.999999747378752e-06."""
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise EngineFailure(f"{self.architecture}.{key} in {self.file.path} must be a number, not {found!r}")
        return float(f"{found:.7g}")

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; a list of them, one for each layer, if they are all equal."""
        found = self.value(key, default)
        if isinstance(found, list) and found and found.count(found[0]) == len(found):
            found = found[0]
        if type(found) is not int or found < 1:
            raise EngineFailure(
                f"{self.architecture}.{key} in {self.file.path} must be a positive integer, the same for all layers, "
                f"not {str(found)[:100]}"
            )
        return found

    def settings(self) -> Settings:
        """Return config.json without the ids of special tokens."""
        return {
            "architectures": [self.family.model_class],
            "model_type": self.family.model_type,
            "dtype": "bfloat16",
            "vocab_size": self.sizes["vocabulary"],
            "hidden_size": self.sizes["hidden"],
            "intermediate_size": self.sizes["inner"],
            "num_hidden_layers": self.sizes["layers"],
            "num_attention_heads": self.sizes["heads"],
            "num_key_value_heads": self.sizes["kv_heads"],
            "head_dim": self.sizes["head"],
            "max_position_embeddings": self.size("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": self.tied,
            **self.family.settings(self),
        }

    def rope(self) -> Settings:
        """Return the parameters of the rotary embedding."""
        theta = {"rope_theta": self.number("rope.freq_base", 10000.0)}
        if _ROPE_FACTORS in self.file.tensors:
            return {"rope_type": "longrope", **theta, **self._factors()}
        kind = self.value("rope.scaling.type", "none")
        if kind == "none":
            factor = self.number("rope.scale_linear", 1.0)  # of old files
            return {"rope_type": "default", **theta} if factor == 1 else self._scaled("linear", factor) | theta
        if kind not in ("linear", "yarn"):
            raise EngineFailure(
                f"{self.architecture}.rope.scaling.type in {self.file.path} is {kind!r}; "
                "supported are none, linear and yarn"
            )
        scaled = self._scaled(kind, self.number("rope.scaling.factor")) | theta
        if kind == "yarn":
            scaled["original_max_position_embeddings"] = self.size("rope.scaling.original_context_length")
        return scaled

    def _scaled(self, kind: str, factor: float) -> Settings:
        return {"rope_type": kind, "factor": factor}

    def _factors(self) -> Settings:
        """Return the file's divisors of the rotary frequencies, Llama 3.1's for example, as factors of one long rope:
        transformers divides by them just so, and scales nothing else."""
        factors = self.file.blocks(_ROPE_FACTORS).view(np.float32).ravel().tolist()
        return {
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": self.size("context_length"),
        }

    def _sizes(self) -> dict[str, int]:
        hidden, heads = self.size("embedding_length"), self.size("attention.head_count")
        kv_heads = self.size("attention.head_count_kv", heads)
        head = self.size("attention.key_length", self.size("rope.dimension_count", hidden // heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.size(key, head) != head:
                raise EngineFailure(
                    f"{self.architecture}.{key} in {self.file.path} is {self.size(key)}, and heads have {head}: models "
                    "with both are not supported"
                )
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise EngineFailure(f"{self.file.path} lacks a vocabulary: tokenizer.ggml.tokens in its metadata")
        return {
            "vocabulary": len(tokens),
            "hidden": hidden,
            "inner": self.size("feed_forward_length"),
            "layers": self.size("block_count"),
            "heads": heads,
            "kv_heads": kv_heads,
            "head": head,
            "queries": heads * head,
            "keys": kv_heads * head,
        }

    def _parts(self) -> dict[str, Part]:
        """Return all tensors that the model can have, by their names in the file."""
        layers = {
            f"blk.{layer}.{name}": part._replace(name=f"model.layers.{layer}.{part.name}")
            for layer in range(min(self.sizes["layers"], len(self.file.tensors)))
            for name, part in self.family.layer.items()
        }
        return _TOP | layers

    def _check_tensors(self) -> None:
        tensors = self.file.tensors
        if lost := [name for name, part in self.parts.items() if name not in tensors and not part.optional]:
            raise EngineFailure(
                f"{self.file.path} lacks the tensor {lost[0]}"
                + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
                + f", which a model of the architecture {self.architecture} with {self.sizes['layers']} layers has"
            )
        for name, tensor in tensors.items():
            if name not in self.parts and name != _ROPE_FACTORS:
                raise EngineFailure(
                    f"{tensor.path} has the tensor {name}, which models of the architecture "
                    f"{self.architecture} are not known to have"
                )
        for name, part in self.parts.items():
            wanted = tuple(self.sizes[size] for size in part.shape)
            if name in tensors and tensors[name].shape != wanted:
                raise EngineFailure(
                    f"the tensor {name} in {tensors[name].path} has the shape {list(tensors[name].shape)}, and the "
                    f"file's metadata asks for {list(wanted)}"
                )
        if _ROPE_FACTORS in tensors:
            factors = tensors[_ROPE_FACTORS]
            if factors.shape != (self.sizes["head"] // 2,) or factors.type != "F32":
                raise EngineFailure(
                    f"the tensor {_ROPE_FACTORS} in {factors.path} is {factors.type} {list(factors.shape)}, not F32 "
                    f"[{self.sizes['head'] // 2}]"
                )

    def _text(self, key: str) -> str:
        found = self.file.metadata.get(key)
        if not isinstance(found, str):
            raise EngineFailure(f"{self.file.path} lacks {key} in its metadata")
        return found


@dataclass(frozen=True)
class GgufFamily:
    """Differences between the GGUF files of an architecture and those of others."""

    model_type: str
    model_class: str
    layer: Mapping[str, Part]
    """A layer's tensors by llama.cpp's names."""
    settings: Callable[[GgufModel], Settings]
    """Returns the entries of config.json that not all families share."""
    restore: Callable[[str, np.ndarray, Mapping[str, int]], np.ndarray] = lambda name, weights, sizes: weights
    """Return transformers' weights, given llama.cpp's name, its float32 weights and the model's sizes."""


def _llama(model: GgufModel) -> Settings:
    return {"hidden_act": "silu", "rope_parameters": model.rope(), "attention_bias": False, "mlp_bias": False}


def _qwen2(model: GgufModel) -> Settings:
    return {"hidden_act": "silu", "rope_parameters": model.rope(), "use_sliding_window": False}


def _qwen3(model: GgufModel) -> Settings:
    return _qwen2(model) | {"attention_bias": False}


def _gemma3(model: GgufModel) -> Settings:
    layers, head = model.sizes["layers"], model.sizes["head"]
    window = model.value("attention.sliding_window", 0)
    period = model.size("attention.sliding_window_pattern", _GEMMA_PATTERN) if window else 1
    local = model.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": model.sizes["hidden"] // model.sizes["heads"] if layers == _GEMMA_27B else head,
        "final_logit_softcapping": model.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or None,
        "layer_types": [
            "full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": model.rope(),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "attention_bias": False,
    }


def _neighbours_apart(name: str, weights: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Reorder the rows of each head: llama.cpp rotates neighbouring rows together, transformers row i and i + half."""
    heads = {"attn_q.weight": sizes["heads"], "attn_k.weight": sizes["kv_heads"]}.get(name)
    if heads is None:
        return weights
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _norms_less_one(name: str, weights: np.ndarray, _: Mapping[str, int]) -> np.ndarray:
    """llama.cpp stores the weights of norms with 1 added."""
    return weights - 1 if name.endswith("norm.weight") else weights


GGUF_FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", _LAYER, _llama, _neighbours_apart),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM", _LAYER | _BIASES, _qwen2),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM", _LAYER | _HEAD_NORMS, _qwen3),
    "gemma3": GgufFamily(
        "gemma3_text", "Gemma3ForCausalLM", _LAYER | _HEAD_NORMS | _SANDWICH, _gemma3, _norms_less_one
    ),
}
