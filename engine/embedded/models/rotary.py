"""Rotary positions, plain and scaled ones, to the bit as transformers computes them (modeling_rope_utils.py)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoints.facts import ModelFacts


class Rotary(NamedTuple):
    """How a model's heads are turned by positions."""

    frequencies: torch.Tensor
    """By how many radians each pair of a head's dimensions turns from one position to the next, float32
    [head_dim / 2]."""
    attention_factor: float = 1.0
    """Factor of all cosines and sines, which YaRN raises for longer contexts."""

    def turns(self, positions: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the cosines and sines for some positions, float32 [positions, head_dim / 2] each.

        By numpy: torch's own start threads for a few values, which take turns with those of a decoder.
        """
        angles = np.array(positions, np.float32)[:, None] * self.frequencies.numpy()
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor


def rotary_of(facts: ModelFacts) -> Rotary | None:
    """Return a model's rotary positions; None if it scales them in a way that is not known here, or by wrong
    numbers."""
    rope = facts.rope
    pairs = torch.arange(0, facts.head_dim, 2).float() / facts.head_dim
    powers = torch.pow(facts.rope_theta, pairs)
    plain = powers.reciprocal()
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return Rotary(plain)
        case "linear":
            factors = _numbers(rope, "factor")
            return Rotary(plain / factors[0]) if factors else None
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(powers, facts)
        case "longrope" if rope.get("attention_factor") == 1 and rope.get("short_factor") == rope.get("long_factor"):
            factors = rope["long_factor"] if isinstance(rope.get("long_factor"), list) else []
            known = len(factors) == len(plain) and all(map(_positive, factors))
            return Rotary((torch.tensor(factors, dtype=torch.float32) * powers).reciprocal()) if known else None
    return None


def _llama3(plain: torch.Tensor, rope: dict[str, Any]) -> Rotary | None:
    """Long waves are stretched by `factor`, short ones are not, those between them partly."""
    numbers = _numbers(rope, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if not numbers:
        return None
    factor, low, high, context = numbers
    if low >= high:
        return None
    waves = 2 * math.pi / plain
    smooth = (context / waves - low) / (high - low)
    partly = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(waves > context / low, plain / factor, torch.where(waves < context / high, plain, partly))
    return Rotary(stretched)


_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 0.0}
"""Defaults of numbers that YaRN's parameters may leave out; 0 stands for none."""


def _yarn(powers: torch.Tensor, facts: ModelFacts) -> Rotary | None:
    """As `_llama3`, with a ramp over dimensions between those that turn `beta_fast` and `beta_slow` times in the
    original context (arXiv:2309.00071)."""
    rope = {key: value for key, value in facts.rope.items() if value is not None}
    rope = {**_YARN, "original_max_position_embeddings": facts.context_length} | rope
    if "original_max_position_embeddings" in facts.text:  # which counts more, as in transformers
        rope["original_max_position_embeddings"] = facts.text["original_max_position_embeddings"]
    optional = [name for name in ("mscale", "mscale_all_dim", "attention_factor") if rope[name] != 0]
    numbers = _numbers(rope, "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", *optional)
    if not numbers or facts.rope_theta <= 1:
        return None
    factor, fast, slow, context = numbers[:4]

    def turning(times: float) -> float:
        """Return the dimension, counted in pairs, whose waves turn so often in the original context."""
        return facts.head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(facts.rope_theta))

    def scale(by: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    low, high = turning(fast), turning(slow)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, facts.head_dim - 1)
    high += 0.001 if low == high else 0
    kept = 1 - ((torch.arange(len(powers), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    if "attention_factor" in optional:
        attention_factor = float(rope["attention_factor"])
    elif len(optional) == 2:
        attention_factor = scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    else:
        attention_factor = scale()
    return Rotary((1.0 / (factor * powers)) * (1 - kept) + 1.0 / powers * kept, attention_factor)


def _numbers(rope: dict[str, Any], *names: str) -> list[float]:
    """Return positive numbers by their names; none if one is wrong."""
    found = [rope.get(name) for name in names]
    return [float(number) for number in found if number is not None] if all(map(_positive, found)) else []


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
