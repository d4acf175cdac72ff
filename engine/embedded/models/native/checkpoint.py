"""The configuration and tensors of a model of the Llama kind, read without transformers; other models are refused.

Vision-language models whose language part is of this kind are taken as well: that part has a configuration and a prefix
of its own, and the vision tower is left where it is.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.checkpoints.families import VisionPart
from engine.embedded.models.devices import UnsupportedModelError
from engine.errors import EngineFailure
from engine.kit.checks import ImageTokens

_LAYER = "model.layers.{}."
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LINEARS = (*_QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of the model and other parameters of its layers."""

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
    vision: VisionPart | None
    """Set for a vision-language model."""
    takes_images: ImageTokens | None


def read_config(folder: Path) -> LlamaConfig:
    """Raises UnsupportedModelError."""
    try:
        facts = read_model_facts(folder)
        _check(facts)
        return LlamaConfig(
            layers=facts.layers,
            hidden=facts.hidden_size,
            intermediate=facts.integer("intermediate_size"),
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            epsilon=facts.number("rms_norm_eps"),
            rope_theta=facts.rope_theta,
            eos_token_ids=facts.eos_token_ids,
            vision=facts.family.vision,
            takes_images=facts.image_tokens,
        )
    except EngineFailure as error:
        raise UnsupportedModelError(str(error)) from error


def _check(facts: ModelFacts) -> None:
    text, rope, window = facts.text, facts.rope, facts.text_family.window
    kinds = {facts.model_type: facts.family, facts.text_type: facts.text_family}
    refusals = {
        **{f"the kind {kind}": not family.compiled for kind, family in kinds.items()},
        "sliding windows": (window is not None and text.get("sliding_window", window) is not None)
        or text.get("use_sliding_window")
        or set(text.get("layer_types") or ()) - {"full_attention"},
        f"the activation {text.get('hidden_act')}": text.get("hidden_act") != "silu",
        "scaled rotary positions": rope.get("rope_type", rope.get("type", "default")) != "default",
        "partly rotated heads": rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)) != 1.0,
        "quantised weights": facts.quantized,
    }
    if reasons := [reason for reason, refused in refusals.items() if refused]:
        raise UnsupportedModelError(f"the compiled path does not know {', '.join(reasons)}")
    if facts.head_dim % 2:
        raise UnsupportedModelError("the compiled path does not know heads of an odd size")


class Checkpoint:
    """The tensors of a folder's safetensors, read when asked for. A context manager."""

    def __init__(self, folder: Path, config: LlamaConfig) -> None:
        """Raises UnsupportedModelError unless it has the tensors of this kind of model and no others."""
        self._files = ExitStack()
        self._places: dict[str, tuple[Any, str]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = self._files.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                plain = config.vision.text_tensor(name) if config.vision else name
                if plain is not None:
                    self._places[plain] = file, name
        names = {name for name in self._places if not name.endswith("rotary_emb.inv_freq")}
        layers = [_LAYER.format(index) for index in range(config.layers)]
        required = {layer + part + ".weight" for layer in layers for part in (*_NORMS, *_LINEARS)}
        required |= {"model.embed_tokens.weight", "model.norm.weight"}
        optional = {layer + part + ".bias" for layer in layers for part in _QKV} | {"lm_head.weight"}
        if wrong := sorted((names ^ required) - optional):
            self._files.close()
            raise UnsupportedModelError(
                f"the compiled path does not know models with, or without, the tensor {wrong[0]}"
            )

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def is_bfloat16(self) -> bool:
        """Whether every tensor is stored as bfloat16; values of other types may still fit bfloat16."""
        return all(file.get_slice(stored).get_dtype() == "BF16" for file, stored in self._places.values())

    def floats(self, name: str) -> torch.Tensor:
        """Return a tensor as float32."""
        return self._tensor(name).float()

    def weight(self, name: str) -> torch.Tensor:
        """Return a matrix as bfloat16 [outputs, inputs]. Raises UnsupportedModelError if that would change it."""
        tensor = self._tensor(name)
        narrow = tensor.bfloat16()
        if tensor.dtype != torch.bfloat16 and not torch.equal(narrow.to(tensor.dtype), tensor):
            raise UnsupportedModelError(f"weights are {tensor.dtype}, and bfloat16 would change them")
        return narrow.contiguous()

    def _tensor(self, name: str) -> torch.Tensor:
        file, stored = self._places[name]
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor
