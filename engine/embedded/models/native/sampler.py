"""Sampling on the compiled path: draws and log-probabilities by `sampling.h`, edits as the reference makes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from engine.embedded.models.native.structures import NativeDraw
from engine.embedded.sampling.sampler import SPARE, Report, Sampler, uniform
from engine.embedded.sampling.state import SamplerState


class NativeSampler(Sampler):
    """A `Sampler` that draws the same tokens by compiled code, from `library`, up to the rounding of exponentials."""

    def __init__(self, vocab_size: int, code: ctypes.CDLL) -> None:
        super().__init__(vocab_size, torch.device("cpu"))
        self._code = code

    def _draw(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
        tokens = torch.empty(len(states), dtype=torch.int64)
        draws = (NativeDraw * len(states))(*map(_describe, states))
        self._code.draw(logits.data_ptr(), *logits.shape, draws, tokens.data_ptr())
        return tokens

    def _report(self, logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]) -> Report:
        logits = logits.contiguous()
        listed = min(max(counts) + SPARE, self._vocab_size)
        values = torch.empty((len(logits), 3 + 2 * listed))
        self._code.report(logits.data_ptr(), *logits.shape, chosen.data_ptr(), listed, values.data_ptr())
        return Report(values, counts, SPARE)


def _describe(state: SamplerState) -> NativeDraw:
    sampling = state.sampling
    races = sampling.seed is not None
    quantile = 0.0 if races else uniform(state.seed, state.position)
    truncation = sampling.temperature, sampling.top_p, sampling.min_p
    # ctypes keeps the low 64 bits of a seed, which are all that count.
    return NativeDraw(state.seed, state.position, sampling.top_k, quantile, *truncation, races)
