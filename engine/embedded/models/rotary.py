"""Rotary positions, plain and scaled ones. Frequencies are to the bit those of transformers, modeling_rope_utils.py."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoints.facts import ModelFacts

_GEMMA_GLOBAL, _GEMMA_LOCAL = 1_000_000.0, 10_000.0
"""Bases of Gemma 3's rotary positions where its config.json names none: in full attention and in sliding windows."""
_UNKNOWN = {"rope_type": "unknown", "rope_theta": 1.0}
"""Parameters that `rotary_of` does not know."""


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


def rotary_of(facts: ModelFacts, rope: dict[str, Any] | None = None) -> Rotary | None:
    """Return a model's rotary positions, or those of some of its layers, `rope`; None if they are scaled in a way that
    is not known here, or by wrong numbers."""
    try:
        found = _rotary(facts, facts.rope if rope is None else rope)
    except (ValueError, OverflowError, ZeroDivisionError):  # of numbers that are out of all proportion
        return None
    return found if found and found.frequencies.isfinite().all() and _positive(found.attention_factor) else None


def ropes_of(facts: ModelFacts) -> list[dict[str, Any]]:
    """Return the parameters of a model's rotary positions; of Gemma 3 those in full attention, then those in sliding
    windows, as transformers reads them from files of both formats (configuration_gemma3.py)."""
    if facts.text_type != "gemma3_text":
        return [facts.rope]
    given, scaling = (facts.text.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    kinds = {"full_attention": scaling, "sliding_attention": {}}
    if not isinstance(given, dict) or not isinstance(scaling, dict) or (given and not given.keys() & kinds):
        return [_UNKNOWN]
    thetas = facts.text.get("rope_theta", _GEMMA_GLOBAL), facts.text.get("rope_local_base_freq", _GEMMA_LOCAL)
    start: dict[str, Any] = {} if given else {"rope_type": "default"}
    return [
        {"rope_theta": theta} | start | (given.get(kind) or {}) | added
        for theta, (kind, added) in zip(thetas, kinds.items(), strict=True)
    ]


def _rotary(facts: ModelFacts, rope: dict[str, Any]) -> Rotary | None:
    if any(isinstance(value, dict) for value in rope.values()):  # other parameters for each type of layer
        return None
    pairs = torch.arange(0, facts.head_dim, 2).float() / facts.head_dim
    theta = rope.get("rope_theta") or facts.rope_theta
    if not _positive(theta):
        return None
    powers = torch.pow(theta, pairs)
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
            return _yarn(powers, facts, rope, theta)
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


def _yarn(powers: torch.Tensor, facts: ModelFacts, parameters: dict[str, Any], theta: float) -> Rotary | None:
    """Dimensions that turn fewer than `beta_slow` times in the original context are stretched by `factor`, those that
    turn more than `beta_fast` times are not, and those between them partly (arXiv:2309.00071)."""
    given = {key: value for key, value in parameters.items() if value is not None}
    rope: dict[str, Any] = {"beta_fast": 32, "beta_slow": 1} | given
    original = "original_max_position_embeddings"
    if original in facts.text:  # this counts more, as in transformers
        rope[original] = facts.text[original]
    elif original not in rope:
        rope[original] = facts.context_length
    optional = [name for name in ("mscale", "mscale_all_dim", "attention_factor") if name in rope]
    if not (numbers := _numbers(rope, "factor", "beta_fast", "beta_slow", original, *optional)):
        return None
    factor, fast, slow, context = numbers[:4]

    def dimension(turns: float) -> float:
        """Return the pair of dimensions that turns so often in the original context."""
        return facts.head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low, high = dimension(fast), dimension(slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, facts.head_dim - 1)
    kept = 1 - ((torch.arange(len(powers)).float() - low) / (high - low or 0.001)).clamp(0, 1)
    frequencies = (1.0 / (factor * powers)) * (1 - kept) + 1.0 / powers * kept
    if "attention_factor" in rope:
        return Rotary(frequencies, rope["attention_factor"])
    if "mscale" in rope and "mscale_all_dim" in rope:
        return Rotary(frequencies, mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"]))
    return Rotary(frequencies, mscale())


def _numbers(rope: dict[str, Any], *names: str) -> list[float]:
    """Return positive numbers by their names; none if one is wrong."""
    found = [rope.get(name) for name in names]
    return [float(number) for number in found if number is not None] if all(map(_positive, found)) else []


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
