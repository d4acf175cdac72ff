"""Folders of EAGLE-3 heads: SafeAILab's, those of vLLM and SGLang, and of the library speculators. No torch here.

A head is one decoder layer whose attention reads, for each position, the embedding of the next token beside three
hidden states of the target, which `fc` joins (https://github.com/SafeAILab/EAGLE). It drafts tokens of a smaller
vocabulary: `d2t` has what to add to their ids. Embeddings, and output rows that a folder leaves out, are the target's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoints.facts import ModelFacts
from engine.checkpoints.headers import Headers, read_headers
from engine.errors import EngineFailure

_LAYERS = ("midlayer.", "layers.0.")
"""Prefixes of the layer's tensors: those of SafeAILab's heads, then those of speculators' heads."""
_NOT_READ = ("embed_tokens.weight", "t2d", "rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that some heads have in addition; their contents are already known."""


@dataclass(frozen=True, slots=True)
class EagleHead:
    """The configuration of a head (config.json), and the names of its tensors."""

    folder: Path
    facts: ModelFacts
    """Facts of the head's decoder layer."""
    taken: tuple[int, ...]
    """Layers of the target whose inputs it reads."""
    draft_vocab_size: int
    norm_before_residual: bool
    names: dict[str, str]
    """Names in the files by the plain ones, such as `q_proj`."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by plain names; `lm_head` and `d2t` may be missing."""
        facts = self.facts
        hidden, width = facts.hidden_size, facts.integer("intermediate_size")
        queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        return {
            "fc": (hidden, len(self.taken) * hidden),
            "q_proj": (queries, 2 * hidden),
            "k_proj": (keys, 2 * hidden),
            "v_proj": (keys, 2 * hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
            "hidden_norm": (hidden,),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "norm": (hidden,),
            "lm_head": (self.draft_vocab_size, hidden),
            "d2t": (self.draft_vocab_size,),
        }


def read_eagle_head(folder: Path, target: ModelFacts) -> EagleHead:
    """Read and check a head for a model. Raises EngineFailure, which names the file that is wrong."""
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFailure(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise EngineFailure(f"{path} is not an object")
    layer = config.get("transformer_layer_config")  # of speculators
    whole = {**config, **(layer if isinstance(layer, dict) else {})}
    facts = ModelFacts({**whole, "model_type": "llama"}, None, folder)
    facts.check_values()
    refused = {
        "hidden_size": (facts.hidden_size, target.hidden_size),
        "vocab_size": (facts.vocab_size, target.vocab_size),
    }
    for key, (found, wanted) in refused.items():
        if found != wanted:
            raise EngineFailure(f"{key} in {path} is {found}, and that of the model in {target.folder} is {wanted}")
    for key, known in (("num_hidden_layers", (1, None)), ("hidden_act", ("silu", None))):
        value = whole.get(key)
        if value not in known:
            raise EngineFailure(f"{key} in {path} is {value!r}: heads are computed that have {known[0]!r}")
    size = whole.get("draft_vocab_size") or facts.vocab_size
    if type(size) is not int or not 0 < size <= facts.vocab_size:
        raise EngineFailure(f"draft_vocab_size in {path} must be a number up to vocab_size, not {size!r}")
    stored = read_headers(folder)
    head = EagleHead(
        folder, facts, _taken(config, target.layers, path), size, bool(whole.get("norm_before_residual")),
        {_plain(name): name for name in stored if not name.endswith(_NOT_READ)},
    )  # fmt: skip
    _check_tensors(head, stored)
    return head


def taken_layers(folder: str, target: ModelFacts) -> tuple[int, ...]:
    """Return the layers of the target whose inputs a head in a folder reads; none without a folder."""
    return read_eagle_head(Path(folder), target).taken if folder else ()


def _taken(config: dict[str, Any], layers: int, path: Path) -> tuple[int, ...]:
    """Return the layers by their inputs. vLLM and speculators count so; in SGLang's `eagle_config` a layer stands for
    its output."""
    named, nested = config.get("eagle_aux_hidden_state_layer_ids"), config.get("eagle_config")
    taken = named if named else [2, layers // 2, layers - 3]
    if not named and isinstance(nested, dict) and (outputs := nested.get("eagle_aux_hidden_state_layer_ids")):
        taken = [index + 1 if type(index) is int else index for index in outputs]
    if not isinstance(taken, list) or not all(type(index) is int and 0 <= index < layers for index in taken):
        raise EngineFailure(f"eagle_aux_hidden_state_layer_ids in {path}: {taken} are not layers of {layers}")
    return tuple(taken)


def _plain(name: str) -> str:
    """Return the last part of a tensor's name that says what it is."""
    for prefix in ("model.", *_LAYERS, "self_attn.", "mlp."):
        name = name.removeprefix(prefix)
    return name.removesuffix(".weight")


def _check_tensors(head: EagleHead, stored: Headers) -> None:
    shapes, optional = head.shapes, {"lm_head", "d2t"}
    if missing := sorted(shapes.keys() - head.names.keys() - optional):
        raise EngineFailure(f"the files in {head.folder} lack the tensor {missing[0]} of an EAGLE-3 head")
    if unknown := sorted(head.names.keys() - shapes.keys()):
        name = head.names[unknown[0]]
        raise EngineFailure(f"the tensor {name} in {stored[name].path} is unknown: this head is not computed")
    if "d2t" not in head.names and head.draft_vocab_size != head.facts.vocab_size:
        raise EngineFailure(f"the files in {head.folder} lack the tensor d2t, which draft_vocab_size needs")
    for plain, name in head.names.items():
        if (found := stored[name]).shape != shapes[plain]:
            raise EngineFailure(
                f"the tensor {name} in {found.path} has the shape {list(found.shape)}, and config.json asks for "
                f"{list(shapes[plain])}"
            )
