"""Sampling for a batch of sequences: temperature, truncation, randomness and log-probabilities.

Order, for each row: log-probabilities of the raw logits; bias, penalties, masks and processors (`penalties.py`); then
greedy, or temperature, top-k, top-p, min-p and one draw. A draw is a pure function of (seed, position in the output).
Requests that name a seed are drawn by a race, which shrugs off the rounding errors by which logits differ from batch to
batch; the others by the cheaper quantile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.embedded.sampling.penalties import edit
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sampling.truncation import Truncation, largest, put, quantile, race, take, weigh
from engine.types import Logprob, TokenLogprobs

_LOWEST_LOGPROB = -9999.0  # what OpenAI reports for a probability of zero; JSON has no infinity
_ROWS_AT_ONCE = 64  # prompt positions turned into float32 at a time: 12 MiB for a vocabulary of 49152


class Sampled(NamedTuple):
    """The tokens that one step sampled for a sequence: one or several."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each token if asked for, else empty."""


class Sampler:
    """Draws one token for each row of a batch."""

    def __init__(
        self, vocab_size: int, device: torch.device, argmax: Callable[[torch.Tensor], torch.Tensor] = largest
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._argmax = argmax

    def sample(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
        """Sample for each state, one token. `logits` is [len(states), vocab] of any float type and may be changed.
        Does not call `accept`."""
        return self.draw(logits, states).results()

    def draw(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> Drawn:
        """Sample as `sample` does, without waiting: on a GPU this returns as soon as all is queued."""
        assert logits.shape == (len(states), self._vocab_size) and logits.device.type == self._device.type
        if all(state.plain for state in states):
            return Drawn(self._argmax(logits))
        edited = [row for row, state in enumerate(states) if state.edited]
        random = [row for row, state in enumerate(states) if not state.greedy]
        reported = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        raw = logits[reported].float() if reported else None
        logits = logits.float().contiguous()
        if edited:
            part = take(logits, edited)
            edit(part, [states[row] for row in edited])
            put(logits, edited, part)
        tokens = largest(logits) if len(random) < len(states) else logits.new_empty(len(states), dtype=torch.int64)
        if random:
            tokens[random] = _draw(take(logits, random), [states[row] for row in random])
        if raw is None:
            return Drawn(tokens)
        return Drawn(
            tokens, reported, Report(raw, tokens[reported], [states[row].sampling.logprobs or 0 for row in reported])
        )


class Drawn:
    """A token for each row, int64 [rows] on the device, and log-probabilities for some. `results` waits for them."""

    def __init__(self, tokens: torch.Tensor, reported: Sequence[int] = (), report: Report | None = None) -> None:
        self.tokens = tokens
        self._on_host = to_host(tokens)
        self._reported = reported
        self._report = report
        self._done = _recorded(tokens.device)

    def results(self) -> list[Sampled]:
        """Return what was sampled for each sequence, in the order of rows."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._on_host.tolist()
        if self._report is None:
            return [Sampled((token,)) for token in tokens]
        entries = {row: (entry,) for row, entry in zip(self._reported, self._report.entries(), strict=True)}
        return [Sampled((token,), entries.get(row, ())) for row, token in enumerate(tokens)]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory, complete once the stream has come this far."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return log-probabilities of prompt tokens: `logits` is [N, vocab], `targets[i]` the prompt token that follows
    position i."""
    report: list[TokenLogprobs] = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        part = targets[start : start + _ROWS_AT_ONCE]
        chosen = torch.tensor(part, device=logits.device)
        found = Report(logits[start : start + len(part)].float(), chosen, [count] * len(part))
        if (done := _recorded(logits.device)) is not None:
            done.synchronize()
        report += found.entries()
    return report


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) that draws output token `position`: 53 bits of a hash, the same on every
    machine."""
    digest = hashlib.blake2b(
        seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little"), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    weights = weigh(logits, [Truncation.of(state.sampling) for state in states])
    seeded = [row for row, state in enumerate(states) if state.sampling.seed is not None]
    free = [row for row, state in enumerate(states) if state.sampling.seed is None]
    tokens = logits.new_empty(len(states), dtype=torch.int64)
    if seeded:
        tokens[seeded] = race(weights, seeded, [(states[row].seed, states[row].position) for row in seeded])
    if free:
        tokens[free] = quantile(take(weights, free), [uniform(states[row].seed, states[row].position) for row in free])
    return tokens


class Report:
    """Log-probabilities of the chosen tokens, int64 [N], and of the `counts[i]` best of each row of `logits`, float32
    [N, vocab].

    The computation is queued at once; `entries` may be called when the stream has come this far.
    """

    def __init__(self, logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]) -> None:
        self._counts = counts
        values = logits.gather(1, chosen.unsqueeze(1))
        ranks = (logits > values).sum(dim=1) + 1
        # A few more than asked for, so that ties at the end are cut by id and not by accident.
        best = logits.topk(min(max(counts) + 8, logits.shape[1]), dim=1)
        of_device = (chosen, values.squeeze(1), logits.logsumexp(dim=1), ranks, best.values, best.indices)
        self._parts = [to_host(part) for part in of_device]

    def entries(self) -> list[TokenLogprobs]:
        """Return for each row the chosen token, then its alternatives; ties are listed by id."""
        report: list[TokenLogprobs] = []
        rows = zip(*(part.tolist() for part in self._parts), self._counts, strict=True)
        for token, value, norm, own_rank, best_values, best_ids, count in rows:
            entries = [_logprob(token, value - norm, own_rank)]
            alternatives = sorted(zip(best_values, best_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
            rank = 1
            for index, (other, token_id) in enumerate(alternatives[:count]):
                if other < alternatives[index - 1][0]:
                    rank = index + 1
                entries.append(_logprob(token_id, other - norm, rank))
            report.append(tuple(entries))
        return report


def _logprob(token_id: int, logprob: float, rank: int) -> Logprob:
    return Logprob(token_id, max(logprob, _LOWEST_LOGPROB), rank)
