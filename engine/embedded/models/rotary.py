"""Frequencies of rotary positions, plain and scaled ones, to the bit as transformers computes them
(modeling_rope_utils.py)."""

import math
from typing import Any

import torch

from engine.checkpoints.facts import ModelFacts


def frequencies(facts: ModelFacts) -> torch.Tensor | None:
    """Return by how many radians each pair of a head's dimensions turns from one position to the next, float32
    [head_dim / 2]; None if the model scales positions in a way that is not known here, or by wrong numbers."""
    rope = facts.rope
    pairs = torch.arange(0, facts.head_dim, 2).float() / facts.head_dim
    powers = torch.pow(facts.rope_theta, pairs)
    plain = powers.reciprocal()
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return plain
        case "linear":
            factors = _numbers(rope, "factor")
            return plain / factors[0] if factors else None
        case "llama3":
            return _llama3(plain, rope)
        case "longrope" if rope.get("attention_factor") == 1 and rope.get("short_factor") == rope.get("long_factor"):
            factors = rope["long_factor"] if isinstance(rope.get("long_factor"), list) else []
            known = len(factors) == len(plain) and all(map(_positive, factors))
            return (torch.tensor(factors, dtype=torch.float32) * powers).reciprocal() if known else None
    return None


def _llama3(plain: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor | None:
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
    return torch.where(waves > context / low, plain / factor, torch.where(waves < context / high, plain, partly))


def _numbers(rope: dict[str, Any], *names: str) -> list[float]:
    """Return positive numbers by their names; none if one is wrong."""
    found = [rope.get(name) for name in names]
    return [float(number) for number in found if number is not None] if all(map(_positive, found)) else []


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
