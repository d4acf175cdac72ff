"""What sets a family of models apart in GGUF files."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

Metadata = dict[str, Any]


class Family(NamedTuple):
    """How to turn back what llama.cpp did to models of one kind."""

    layer_names: dict[str, str]
    """llama.cpp's names of a layer's parts, and transformers'."""
    config: Callable[[Metadata], dict[str, Any]]
    """config.json, without what all families have."""
    tokenizer: Callable[[Metadata], Tokenizer]
    restore: Callable[[str, np.ndarray, dict[str, Any]], np.ndarray]
    """From llama.cpp's name of a part, its float32 weights and config.json to the weights that transformers has."""


def decimal(value: float) -> float:
    """The number that was meant by a float32: 1e-05 for 9.999999747378752e-06."""
    return float(f"{value:.7g}")
