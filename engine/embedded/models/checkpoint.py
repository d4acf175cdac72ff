"""The configuration and tensors of a model of the Llama kind, read without transformers for `native` and `cuda`. Other
models are refused, and so are tensors that do not fit: compiled code trusts their sizes.

Vision-language models whose language part is of this kind are taken as well: that part has a configuration and a prefix
of its own, and the vision tower is left where it is.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import safe_open

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.checkpoints.headers import check_headers, check_shapes, place, read_headers
from engine.embedded.kv.layout import KINDS, Attends
from engine.embedded.models.devices import UnsupportedModelError
from engine.embedded.models.rotary import Rotary, ropes_of, rotary_of
from engine.errors import EngineFailure
from engine.kit.checks import ImageTokens

_BIASED = "qwen2"
"""The model type whose query, key and value projections have biases."""

_NORMED = "qwen3"
"""The model type that normalises each head of queries and of keys."""

_GEMMA = "gemma3_text"
"""The model type of Gemma 3's text models."""

_GEMMA_PATTERN = 6
"""Gemma 3 attends to all tokens in every sixth layer, unless its config.json says otherwise."""

_FREQUENCIES = "rotary_emb.inv_freq"
"""Part of the names of tensors that old files contain although they follow from the configuration."""

_READERS = 8
"""Tensors that are read at a time: a thread alone copies slower than a GPU takes."""


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
    """Maximum number of tokens of a sequence: the model's, or a smaller one that was asked for."""
    epsilon: float
    rotaries: tuple[Rotary, ...]
    """How heads are turned: all in one way, or those of full attention in the first and of windows in the second."""
    eos_token_ids: tuple[int, ...]
    tied: bool
    """Whether the output head shares its weights with the embedding."""
    biased: bool
    """Whether the projections of queries, keys and values have biases."""
    head_norms: bool
    """Whether each head of queries and of keys is normalised before it is turned."""
    gemma: bool
    """Whether it is computed as Gemma 3: embeddings times the root of the hidden size, gates by GELU, norms whose
    weights count from one, and norms of what attention and the MLP add."""
    sliding: tuple[bool, ...]
    """Whether each layer is one of a sliding window, however long."""
    windows: tuple[int | None, ...]
    """Attention window of each layer; None for one as long as the context, and for full attention."""
    scale: float
    """Factor of attention scores."""
    facts: ModelFacts
    takes_images: ImageTokens | None

    @property
    def attends(self) -> Attends:
        return Attends(self.windows, self.kv_heads, self.head_dim)

    @property
    def rotary(self) -> Rotary:
        """How heads are turned in full attention."""
        return self.rotaries[0]

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
        if self.head_norms:
            layer |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        if self.gemma:
            layer |= {f"{name}_feedforward_layernorm.weight": (self.hidden,) for name in ("pre", "post")}
        embedding = (self.vocab_size, self.hidden)
        return {
            "model.embed_tokens.weight": embedding,
            **{f"model.layers.{index}.{name}": shape for index in range(self.layers) for name, shape in layer.items()},
            "model.norm.weight": (self.hidden,),
            **({} if self.tied else {"lm_head.weight": embedding}),
        }


def read_config(folder: Path, max_seq_len: int = 0) -> LlamaConfig:
    """Read config.json, for sequences of at most `max_seq_len` tokens if that is not 0. Keys that it leaves out have
    transformers' defaults. Raises EngineFailure for values that no model can have, and UnsupportedModelError for other
    models."""
    facts = read_model_facts(folder).with_defaults()
    facts.check_values()
    try:
        _check(facts)
        context_length = min(max_seq_len or facts.context_length, facts.context_length)
        ropes = ropes_of(facts)
        rotaries = [rotary for rope in ropes if (rotary := rotary_of(facts, rope)) is not None]
        if len(rotaries) < len(ropes):
            raise UnsupportedModelError("the fast path does not know these scaled rotary positions")
        sliding, gemma = _sliding(facts), facts.text_type == _GEMMA
        window = facts.integer("sliding_window") if any(sliding) else 0
        return LlamaConfig(
            layers=facts.layers,
            hidden=facts.hidden_size,
            intermediate=facts.integer("intermediate_size"),
            heads=facts.heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            vocab_size=facts.vocab_size,
            context_length=context_length,
            epsilon=facts.number("rms_norm_eps"),
            rotaries=tuple(rotaries),
            eos_token_ids=facts.eos_token_ids,
            tied=facts.tied,
            biased=facts.text_type == _BIASED,
            head_norms=facts.text_type in (_NORMED, _GEMMA),
            gemma=gemma,
            sliding=sliding,
            windows=tuple(window if slides and window < context_length else None for slides in sliding),
            scale=(facts.number("query_pre_attn_scalar") if gemma else facts.head_dim) ** -0.5,
            facts=facts,
            takes_images=facts.image_tokens,
        )
    except EngineFailure as error:
        raise UnsupportedModelError(str(error)) from error


def _sliding(facts: ModelFacts) -> tuple[bool, ...]:
    """Return for each layer whether it attends to a window."""
    if facts.text_type != _GEMMA:
        return (facts.text_family.slides and facts.text.get("sliding_window") is not None,) * facts.layers
    kinds = facts.text.get("layer_types")
    if kinds is None:
        pattern = facts.text.get("sliding_window_pattern", _GEMMA_PATTERN)
        if type(pattern) is not int or pattern < 1:
            raise UnsupportedModelError(f"the fast path does not know the sliding_window_pattern {pattern!r}")
        return tuple(index % pattern > 0 for index in range(1, 1 + facts.layers))
    if len(kinds) != facts.layers:
        raise UnsupportedModelError(f"layer_types has {len(kinds)} entries for {facts.layers} layers")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _check(facts: ModelFacts) -> None:
    text, gemma = facts.text, facts.text_type == _GEMMA
    kinds = {facts.model_type: facts.family, facts.text_type: facts.text_family}
    key, wanted = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    named = text.get(key) or text.get("hidden_activation")  # whatever config.json calls it
    activation = f"the activation {named}" if named else f"a model without {key}"
    known = KINDS if gemma else {"full_attention"}
    rotated = [rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)) for rope in ropes_of(facts)]
    refusals = {
        **{f"the model type {kind}": not family.compiled for kind, family in kinds.items()},
        "sliding windows": text.get("use_sliding_window") or set(text.get("layer_types") or ()) - known,
        activation: text.get(key) != wanted,
        "partly rotated heads": any(factor != 1.0 for factor in rotated),
        "capped logits": gemma and (text.get("final_logit_softcapping") or text.get("attn_logit_softcapping")),
        "attention in both directions": gemma and text.get("use_bidirectional_attention"),
        "quantised weights": facts.quantized,
        "biases of all projections": text.get("attention_bias") or text.get("mlp_bias"),
    }
    if reasons := [reason for reason, refused in refusals.items() if refused]:
        raise UnsupportedModelError(f"the fast path does not know {', '.join(reasons)}")
    if facts.head_dim % 2:
        raise UnsupportedModelError("the fast path does not know heads of an odd size")


class Checkpoint:
    """The tensors of a folder's safetensors, read when asked for. A context manager."""

    def __init__(self, folder: Path, config: LlamaConfig) -> None:
        """Raises UnsupportedModelError if a tensor of this kind of model is missing, EngineFailure for tensors that no
        model of this configuration can have."""
        self.folder = folder
        stored, part = read_headers(folder), config.facts.family.media
        check_headers(config.facts, stored)
        plain_names = {name: part.text_tensor(name) if part else name for name in stored}
        names = {plain: name for name, plain in plain_names.items() if plain is not None}
        shapes = config.shapes
        if missing := sorted(shapes.keys() - names.keys()):
            raise UnsupportedModelError(f"the fast path does not know models without the tensor {missing[0]}")
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

    def __enter__(self) -> Self:
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

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the type that it is stored in."""
        tensor: torch.Tensor = self._files[self._stored[name].path].get_tensor(self._names[name])
        return tensor

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read tensors by their names into memory of one device and one type, several at a time, straight from the
        files to the device. Raises EngineFailure for values that are not finite."""
        device, names = next(iter(tensors.values())).device, iter(tensors)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(device)  # the memory may have been used on another stream

        @torch.inference_mode()
        def read(names: Iterator[str]) -> None:
            stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                for name in names:  # which the threads take in turn
                    with safe_open(self._stored[name].path, framework="pt", device=str(device)) as file:
                        tensors[name].copy_(file.get_tensor(self._names[name]))
                    if not is_finite(tensors[name]):
                        raise EngineFailure(f"{self.place(name)} has values that are not finite")

        with ThreadPoolExecutor(_READERS) as pool:
            for done in [pool.submit(read, names) for _ in range(_READERS)]:
                done.result()


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite. Types that torch cannot add are assumed to be."""
    if values.dtype.itemsize < 2 or not values.is_floating_point():
        return True
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())  # a sum is fast, but large ones overflow
