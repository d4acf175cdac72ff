"""The configuration and tensors of a model of the Llama kind, read without transformers. Other models are refused, and
so are tensors that do not fit: compiled code trusts their sizes.

Vision-language models whose language part is of this kind are taken as well: that part has a configuration and a prefix
of its own, and the vision tower is left where it is.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from engine.checkpoints.conversions import source_of
from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.checkpoints.gguf.families import GgufModel
from engine.checkpoints.gguf.file import GgufFile
from engine.checkpoints.headers import check_headers, check_shapes, place, read_headers
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.native.rotary import frequencies
from engine.embedded.models.native.structures import Kind
from engine.errors import EngineFailure
from engine.kit.checks import ImageTokens

_BIASED = "qwen2"
"""The model type whose query, key and value projections have biases."""

_FREQUENCIES = "rotary_emb.inv_freq"
"""Part of the names of tensors that old files contain although they follow from the configuration."""


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
    frequencies: torch.Tensor
    """Frequencies of the rotary position embedding, float32 [head_dim / 2]."""
    eos_token_ids: tuple[int, ...]
    tied: bool
    """Whether the output head shares its weights with the embedding."""
    biased: bool
    facts: ModelFacts
    takes_images: ImageTokens | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the model's tensors, without `lm_head.weight` if the head shares the embedding."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        if self.biased:
            layer |= {
                f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (queries, keys, keys), strict=True)
            }
        embedding = (self.vocab_size, self.hidden)
        return {
            "model.embed_tokens.weight": embedding,
            **{f"model.layers.{index}.{name}": shape for index in range(self.layers) for name, shape in layer.items()},
            "model.norm.weight": (self.hidden,),
            **({} if self.tied else {"lm_head.weight": embedding}),
        }


def read_config(folder: Path) -> LlamaConfig:
    """Read config.json. Raises EngineFailure for values that no model can have, and UnsupportedModelError for other
    models."""
    facts = read_model_facts(folder)
    facts.check_values()
    try:
        _check(facts)
        if (rotary := frequencies(facts)) is None:
            raise UnsupportedModelError("the compiled path does not know these scaled rotary positions")
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
            frequencies=rotary,
            eos_token_ids=facts.eos_token_ids,
            tied=facts.tied,
            biased=facts.text_type == _BIASED,
            facts=facts,
            takes_images=facts.image_tokens,
        )
    except EngineFailure as error:
        raise UnsupportedModelError(str(error)) from error


def _check(facts: ModelFacts) -> None:
    text, rope, window = facts.text, facts.rope, facts.text_family.window
    kinds = {facts.model_type: facts.family, facts.text_type: facts.text_family}
    named = text.get("hidden_act") or text.get("hidden_activation")
    activation = f"the activation {named}" if named else "a model without hidden_act"
    refusals = {
        **{f"the model type {kind}": not family.compiled for kind, family in kinds.items()},
        "sliding windows": (window is not None and text.get("sliding_window", window) is not None)
        or text.get("use_sliding_window")
        or set(text.get("layer_types") or ()) - {"full_attention"},
        activation: text.get("hidden_act") != "silu",
        "partly rotated heads": rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)) != 1.0,
        "quantised weights": facts.quantized,
        "biases of all projections": text.get("attention_bias") or text.get("mlp_bias"),
    }
    if reasons := [reason for reason, refused in refusals.items() if refused]:
        raise UnsupportedModelError(f"the compiled path does not know {', '.join(reasons)}")
    if facts.head_dim % 2:
        raise UnsupportedModelError("the compiled path does not know heads of an odd size")


class _GgufTensors:
    """The tensors of a GGUF file under their names in a folder made of it."""

    def __init__(self, path: Path | None) -> None:
        self._model = None if path is None else GgufModel(GgufFile(path))
        parts = self._model.parts if self._model else {}
        self._names = {part.name: name for name, part in parts.items()}
        stored = self._model.file.tensors if self._model else {}
        self.tensors = {name: stored[own] for name, own in self._names.items() if own in stored}

    def blocks(self, name: str) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        """Return the bytes of a tensor, its rows in the folder's order."""
        assert self._model is not None
        own = self._names[name]
        part = own.split(".", 2)[-1] if own.startswith("blk.") else own
        rows = self._model.family.restore(part, self._model.file.blocks(own), self._model.sizes)
        return np.array(rows)  # aligned, and not of a file that may shrink


class Checkpoint:
    """The tensors of a folder's safetensors, read when asked for. A context manager."""

    def __init__(self, folder: Path, config: LlamaConfig) -> None:
        """Raises UnsupportedModelError if a tensor of this kind of model is missing, EngineFailure for tensors that no
        model of this configuration can have."""
        self._folder = folder
        stored, part = read_headers(folder), config.facts.family.media
        check_headers(config.facts, stored)
        plain_names = {name: part.text_tensor(name) if part else name for name in stored}
        names = {plain: name for name, plain in plain_names.items() if plain is not None}
        shapes = config.shapes
        if missing := sorted(shapes.keys() - names.keys()):
            raise UnsupportedModelError(f"the compiled path does not know models without the tensor {missing[0]}")
        self._stored = {plain: stored[name] for plain, name in names.items()}
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
        check_shapes(self._stored, shapes)
        self.unused = [name for plain, name in names.items() if plain not in shapes and _FREQUENCIES not in plain]
        """Tensors in the files that the model does not have."""
        self._names = names
        self._opened = ExitStack()
        self._files = {
            path: self._opened.enter_context(safe_open(path, framework="pt"))
            for path in {tensor.path for tensor in self._stored.values()}
        }

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def is_bfloat16(self) -> bool:
        """Whether every tensor is stored as bfloat16; values of other types may still fit bfloat16."""
        return all(tensor.dtype == "BF16" for tensor in self._stored.values())

    def place(self, name: str) -> str:
        """Return a tensor and its file for a message."""
        return place(self._stored, name)

    def floats(self, name: str) -> torch.Tensor:
        """Return a tensor as float32."""
        return self.tensor(name).float()

    def weight(self, name: str) -> torch.Tensor:
        """Return a matrix as bfloat16 [outputs, inputs]. Raises UnsupportedModelError if that would change it."""
        tensor = self.tensor(name)
        narrow = tensor.bfloat16()
        if tensor.dtype != torch.bfloat16 and not torch.equal(narrow.to(tensor.dtype), tensor):
            raise UnsupportedModelError(f"weights are {tensor.dtype}, and bfloat16 would change them")
        return narrow.contiguous()

    def block_kind(self, name: str) -> Kind | None:
        """Return the kind of blocks of a matrix in the GGUF file from which the folder was converted.

        None if that file is not there, or if `decoder.cpp` does not compute this kind.
        """
        stored = self._gguf.tensors.get(name)
        return Kind[stored.type] if stored and stored.type in Kind.__members__ else None

    @property
    def source(self) -> str:
        """Path, size and times of the GGUF file that `blocks` reads, which identify its contents; empty without one."""
        if (path := source_of(self._folder)) is None:
            return ""
        stat = path.stat()
        return f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"

    def blocks(self, name: str) -> torch.Tensor:
        """Return a matrix of a `block_kind` as rows of blocks [outputs, bytes]."""
        return torch.from_numpy(self._gguf.blocks(name))

    @cached_property
    def _gguf(self) -> "_GgufTensors":
        return _GgufTensors(source_of(self._folder))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the type that it is stored in."""
        tensor: torch.Tensor = self._files[self._stored[name].path].get_tensor(self._names[name])
        return tensor
