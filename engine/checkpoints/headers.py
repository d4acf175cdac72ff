"""Headers of a folder's safetensors, and checks that a model can be made of them. They need no torch.

Whoever loads weights asks here first: the compiled path, transformers' classes on any device, and vision towers. A
tensor that they find missing, of another shape or not finite has its name and file from `place`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from engine.checkpoints.facts import ModelFacts
from engine.errors import EngineFailure

_INDEX = "model.safetensors.index.json"
_WHOLE_NUMBERS = {"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"}
_LAYER = re.compile(r"(.*?\b(?:layers|h|blocks))\.(\d+)\.")
_SOME = 5
"""Number of tensors that a message lists."""


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    dtype: str
    """Name of the type in safetensors, such as BF16."""
    shape: tuple[int, ...]


Headers = Mapping[str, StoredTensor]
"""Tensors by their names in the files."""


def read_headers(folder: Path) -> Headers:
    """Read the headers of the files that transformers would read. Raises EngineFailure for a file that is missing or
    damaged."""
    found: dict[str, StoredTensor] = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    part = file.get_slice(name)
                    found[name] = StoredTensor(path, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise EngineFailure(f"{path} is damaged or not a safetensors file: {error}") from error
    return found


def check_headers(facts: ModelFacts, stored: Headers) -> None:
    """Raise EngineFailure if weights are whole numbers, or if there are more or fewer layers than config.json says."""
    for name, tensor in stored.items():
        weight = name.endswith("weight") or (name.endswith("bias") and len(tensor.shape) == 1)
        if weight and tensor.dtype in _WHOLE_NUMBERS and not facts.quantized:
            raise EngineFailure(
                f"{place(stored, name)} has the type {tensor.dtype}: weights are floating-point numbers, unless "
                "config.json has a quantization_config"
            )
    counts = _layers(facts, stored)
    layers = facts.text.get("num_hidden_layers")
    more = facts.text.get("num_nextn_predict_layers")  # stored like layers, for speculation
    wanted = {layers, layers + more if type(layers) is int and type(more) is int else layers}
    if counts and layers is not None and not counts & wanted:
        raise EngineFailure(
            f"num_hidden_layers in the config.json of {facts.folder} is {layers}, but its safetensors have "
            f"{' or '.join(map(str, sorted(counts)))} layers"
        )


def check_shapes(stored: Headers, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise EngineFailure for the first tensor of another shape; names that are not stored are not looked at."""
    for name, shape in wanted.items():
        if name in stored and stored[name].shape != shape:
            raise EngineFailure(
                f"{place(stored, name)} has the shape {list(stored[name].shape)}, and config.json asks for "
                f"{list(shape)}"
            )


def place(stored: Headers, name: str) -> str:
    """Return a tensor and its file for a message. Of a name that transformers has changed, only the end is stored."""
    parts = name.split(".")
    for first in range(len(parts) - 1):
        end = ".".join(parts[first:])
        if match := next((key for key in stored if f".{key}".endswith(f".{end}")), None):
            return f"the tensor {match} in {stored[match].path}"
    return f"the tensor {name}"


def some(names: Collection[str]) -> str:
    """Return the number of tensors and the first of their names for a message."""
    first = sorted(names)[:_SOME]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'}: {', '.join(first)}{more}"


def _files(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / _INDEX
    if whole.is_file() or not index.is_file():
        paths = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
        if not paths:
            raise EngineFailure(f"{folder} has no model.safetensors")
        return paths
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        names = {str(name) for name in content["weight_map"].values()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise EngineFailure(f"{index} is not an index of safetensors files: {error!r}") from error
    if lost := sorted(name for name in names if not (folder / name).is_file()):
        raise EngineFailure(f"{folder} lacks {lost[0]}, which {_INDEX} names: download the model again")
    return [folder / name for name in sorted(names)]


def _layers(facts: ModelFacts, stored: Headers) -> set[int]:
    """Return how many layers each stack of layers has; those of a vision tower count only where nothing tells them
    apart."""
    part = facts.family.media
    stacks: defaultdict[str, set[int]] = defaultdict(set)
    for name in stored:
        plain = part.text_tensor(name) if part else name
        if plain is not None and (match := _LAYER.match(plain)):
            stacks[match[1]].add(int(match[2]))
    return {len(numbers) for numbers in stacks.values()}
