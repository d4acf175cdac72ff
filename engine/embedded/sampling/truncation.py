"""Temperature, top-k, top-p, min-p and the draw, for a batch of rows, without sorting the vocabulary.

Every truncation keeps the tokens at or above a threshold, so a row's result is one number; tokens that tie with the
last one kept are kept too. The draw inverts the cumulative distribution in order of token id: no order of equal logits
can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from engine.kit.noise import exponentials
from engine.types import SamplingParams

_CHUNK = 256
"""Ids summed at a time: the draw finds the chunk first, because a running sum over a whole vocabulary is slow."""
_FIRST_LOOK = 128
"""Largest logits looked at before the whole row is sorted; nearly every top-p is covered by them."""


class Truncation(NamedTuple):
    """Parameters of one row's truncation; the names are those of `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, sampling: SamplingParams) -> Truncation:
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def quantile(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Draw one token id, int64 [N], for each row of `weights`, float32 [N, vocab], at the quantile `uniforms[i]` in [0,
    1), ids in order.

    In a flat distribution the least change of the weights moves every later id, and so the choice.
    """
    chunks = pad(weights, (0, -weights.shape[1] % _CHUNK)).view(len(weights), -1, _CHUNK)
    chunk, rest = _invert(chunks.sum(dim=2).double(), _column(uniforms, weights, torch.float64))
    inside = chunks.gather(1, chunk.unsqueeze(2).expand(-1, -1, _CHUNK)).squeeze(1)
    offset, _ = _invert(inside.double(), rest)
    return (chunk * _CHUNK + offset).squeeze(1)


def race(weights: torch.Tensor, rows: Sequence[int], keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Draw one token id, int64 [rows], for each of `rows` of `weights` by the exponential race: the largest weight /
    noise wins.

    Every id has noise of its own, from the row's key (seed, position), so a small change of the weights changes the
    choice only if the two best were about to swap. Costs one exponential per id.
    """
    ids = []
    for row, (seed, position) in zip(rows, keys, strict=True):
        noise = torch.from_numpy(exponentials(seed, position, weights.shape[1])).to(weights.device)
        ids.append((weights[row] / noise).argmax())
    return torch.stack(ids)


def _invert(weights: torch.Tensor, quantiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each row of `weights`, float64 [N, M], at each quantile, and the quantile of what is left
    within that index."""
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first index with more cumulative weight exists and has weight.
    target = torch.minimum(quantiles * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)
    weight = weights.gather(1, index)
    return index, ((target - (cumulative.gather(1, index) - weight)) / weight).clamp_(0, 1)


def weigh(logits: torch.Tensor, truncations: Sequence[Truncation]) -> torch.Tensor:
    """Return probabilities after temperature and truncation, not normalised: 1 for the likeliest token of each row,
    0 for those cut."""
    temperatures = _column([max(truncation.temperature, 1e-30) for truncation in truncations], logits)
    scaled = (logits - logits.amax(dim=1, keepdim=True)).div_(temperatures)
    weights = scaled.exp()
    cut = [
        row
        for row, truncation in enumerate(truncations)
        if 0 < truncation.top_k < logits.shape[1] or truncation.top_p < 1
    ]
    if cut:
        scaled_cut, weights_cut = take(scaled, cut), take(weights, cut)
        thresholds = _thresholds(scaled_cut, weights_cut, [truncations[row] for row in cut])
        put(weights, cut, weights_cut.masked_fill_(scaled_cut < thresholds, 0))
    if any(truncation.min_p > 0 for truncation in truncations):
        weights.masked_fill_(weights < _column([truncation.min_p for truncation in truncations], logits), 0)
    return weights


def _thresholds(scaled: torch.Tensor, weights: torch.Tensor, truncations: Sequence[Truncation]) -> torch.Tensor:
    """Return the smallest scaled logit kept in each row, [N, 1]: that of top-k, then that of top-p among what top-k
    keeps."""
    vocab_size = scaled.shape[1]
    ks = [truncation.top_k if 0 < truncation.top_k < vocab_size else 0 for truncation in truncations]
    best = scaled.topk(min(vocab_size, max(_FIRST_LOOK, *ks)), dim=1).values
    thresholds = torch.full_like(best[:, :1], float("-inf"))
    limited = [row for row, k in enumerate(ks) if k]
    if limited:
        thresholds[limited] = best[limited].gather(1, _column([ks[row] - 1 for row in limited], scaled, torch.int64))
    nucleus = [row for row, truncation in enumerate(truncations) if truncation.top_p < 1]
    if nucleus:
        part, kept = take(scaled, nucleus), take(weights, nucleus)
        if limited:
            kept = kept.masked_fill(part < thresholds[nucleus], 0)
        goals = kept.sum(dim=1, keepdim=True) * _column([truncations[row].top_p for row in nucleus], scaled)
        if scaled.device.type != "cpu":  # looking at what was missed would wait for the device; sorting is cheap there
            reached, _ = _reach(_descending(part), goals)
        else:
            reached, last = _reach(best[nucleus], goals)
            missed: list[int] = torch.nonzero(last == best.shape[1])[:, 0].tolist()
            if missed and best.shape[1] < vocab_size:
                reached[missed], _ = _reach(_descending(take(part, missed)), goals[missed])
        thresholds[nucleus] = torch.maximum(reached, thresholds[nucleus])
    return thresholds


def _reach(best: torch.Tensor, goals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled logit at which the running mass of the sorted `best`, [N, M], reaches each goal, [N, 1], and
    its index, [N]: M if it is never reached."""
    last = torch.searchsorted(best.exp().cumsum(dim=1), goals)
    return best.gather(1, last.clamp(max=best.shape[1] - 1)), last[:, 0]


def take(batch: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows, in order: a copy, or the batch itself if they are all of it."""
    return batch if len(rows) == len(batch) else batch[rows]


def put(batch: torch.Tensor, rows: Sequence[int], part: torch.Tensor) -> None:
    """Write back what `take` returned, after it was changed in place."""
    if part is not batch:
        batch[rows] = part


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of the largest logit of each row, int64 [rows]. On a CPU by NumPy, for the reason that
    `apply_bitmask` has."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def _descending(rows: torch.Tensor) -> torch.Tensor:
    """Sort each row, on a CPU by NumPy, which sorts float32 fifteen times as fast as torch 2.13."""
    if rows.device.type == "cpu":
        return torch.from_numpy(np.sort(rows.numpy(), axis=1)).flip(1)
    return rows.sort(dim=1, descending=True).values


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device).unsqueeze(1)
