"""How the GGUF files of one model family differ from those of another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

Metadata = dict[str, Any]


class GgufFamily(NamedTuple):
    """How to reverse what llama.cpp's converter does to models of one family."""

    layer_names: dict[str, str]
    """Names of a layer's parts: llama.cpp's to transformers'."""
    config: Callable[[Metadata], dict[str, Any]]
    """Return config.json without the keys that all families share."""
    tokenizer: Callable[[Metadata], Tokenizer]
    restore: Callable[[str, np.ndarray, dict[str, Any]], np.ndarray]
    """Return transformers' weights, given llama.cpp's name of a part, its float32 weights and config.json."""


def decimal(value: float) -> float:
    """Return the shortest decimal behind a float32: 1e-05 for 9.999999747378752e-06."""
    return float(f"{value:.7g}")
