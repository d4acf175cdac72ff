"""Temperature, top-k, top-p, min-p and the draw, for a batch of rows, without sorting the vocabulary.

Every truncation keeps the tokens at or above a threshold, so a row's result is one number; tokens that tie with the last one kept are
kept too. The draw inverts the cumulative distribution in order of token id: no order of equal logits can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.types import SamplingParams

_CUT = float("-inf")
_FIRST_LOOK = 256
"""Largest logits looked at before the whole row is sorted; nearly every top-p is covered by them."""


class Truncation(NamedTuple):
    """How one row is shaped before the draw; the names are those of `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, sampling: SamplingParams) -> Truncation:
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def draw(logits: torch.Tensor, truncations: Sequence[Truncation], uniforms: Sequence[float]) -> list[int]:
    """One token id for each row of `logits`, float32 [N, vocab], at the quantile `uniforms[i]` in [0, 1)."""
    scaled = truncate(logits, truncations)
    cumulative = scaled.exp_().cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first id whose cumulative weight exceeds the target exists and has weight.
    target = torch.minimum(_column(uniforms, logits, torch.float64) * total, torch.nextafter(total, torch.zeros_like(total)))
    ids: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(1).tolist()
    return ids


def truncate(logits: torch.Tensor, truncations: Sequence[Truncation]) -> torch.Tensor:
    """Logits over temperature, 0 for the likeliest token of each row and -inf for those cut; a new tensor."""
    temperatures = _column([max(truncation.temperature, 1e-30) for truncation in truncations], logits)
    scaled = (logits - logits.amax(dim=1, keepdim=True)).div_(temperatures)
    vocab_size = logits.shape[1]
    cut = [row for row, truncation in enumerate(truncations) if 0 < truncation.top_k < vocab_size or truncation.top_p < 1]
    if cut:
        part = scaled[cut]
        scaled[cut] = part.masked_fill_(part < _thresholds(part, [truncations[row] for row in cut]), _CUT)
    if any(truncation.min_p > 0 for truncation in truncations):
        # The likeliest token has scaled logit 0, so the bound relative to its probability is a bound on the scaled logit.
        scaled.masked_fill_(scaled < _column([truncation.min_p for truncation in truncations], logits).log_(), _CUT)
    return scaled


def _thresholds(scaled: torch.Tensor, truncations: Sequence[Truncation]) -> torch.Tensor:
    """The smallest scaled logit kept in each row, [N, 1]: that of top-k, then that of top-p among what top-k keeps."""
    vocab_size = scaled.shape[1]
    ks = [truncation.top_k if 0 < truncation.top_k < vocab_size else 0 for truncation in truncations]
    best = scaled.topk(min(vocab_size, max(_FIRST_LOOK, *ks)), dim=1).values
    thresholds = torch.full_like(best[:, :1], _CUT)
    limited = [row for row, k in enumerate(ks) if k]
    if limited:
        thresholds[limited] = best[limited].gather(1, _column([ks[row] - 1 for row in limited], scaled, torch.int64))
    nucleus = [row for row, truncation in enumerate(truncations) if truncation.top_p < 1]
    if nucleus:
        goals = (
            scaled[nucleus].masked_fill(scaled[nucleus] < thresholds[nucleus], _CUT).exp_().sum(dim=1, keepdim=True, dtype=torch.float64)
        )
        goals *= _column([truncations[row].top_p for row in nucleus], scaled, torch.float64)
        reached, missed = _reach(best[nucleus], goals)
        if missed and best.shape[1] < vocab_size:
            everything = scaled[[nucleus[index] for index in missed]].sort(dim=1, descending=True).values
            reached[missed], _ = _reach(everything, goals[missed])
        thresholds[nucleus] = torch.maximum(reached, thresholds[nucleus])
    return thresholds


def _reach(best: torch.Tensor, goals: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The scaled logit at which the running mass of the sorted `best` reaches each goal, [N, 1], and the rows where it does not."""
    last = torch.searchsorted(best.exp().cumsum(dim=1, dtype=torch.float64), goals)
    missed: list[int] = torch.nonzero(last[:, 0] == best.shape[1])[:, 0].tolist()
    return best.gather(1, last.clamp(max=best.shape[1] - 1)), missed


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)
