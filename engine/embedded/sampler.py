"""From logits to tokens, for a batch of sequences: one home of temperature, truncation, randomness and log-probabilities.

Order, for each row: log-probabilities of the raw logits; bias, penalties, masks and processors (`penalties.py`); then greedy, or
temperature, top-k, top-p, min-p and one draw. A draw is a pure function of (seed, position in the output). Requests that name a seed are
drawn by a race, which shrugs off the rounding errors by which logits differ from batch to batch; the others by the cheaper quantile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.embedded.grammar import Matcher
from engine.embedded.penalties import edit
from engine.embedded.truncation import Truncation, put, quantile, race, take, weigh
from engine.logits import create
from engine.types import Logprob, SamplingParams, TokenLogprobs

_LOWEST_LOGPROB = -9999.0  # what OpenAI reports for a probability of zero; JSON has no infinity
_ROWS_AT_ONCE = 64  # prompt positions turned into float32 at a time: 12 MiB for a vocabulary of 49152


class Bias(NamedTuple):
    ids: torch.Tensor
    """int64 [k]"""
    values: torch.Tensor
    """float32 [k]"""


class Sampled(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None


class SamplerState:
    """What sampling must remember of one sequence. Built once on admission, kept through preemption.

    Raises InvalidRequest if the request names a logits processor that is not registered.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        eos_token_ids: tuple[int, ...],
        seed: int,
        matcher: Matcher | None,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sampling = sampling
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.matcher = matcher
        self.tokens = list(prompt)
        self.num_prompt = len(self.tokens)
        self.processors = [create(name) for name in sampling.processors]
        self.processor_failed = False
        # top_k 1 is greedy too: the lowest id wins a tie, where truncation would keep both.
        self.greedy = sampling.temperature == 0 or sampling.top_k == 1
        self.bias = _bias(sampling.logit_bias, device)
        self.forbidden = _forbidden(sampling.allowed_token_ids, vocab_size, device)
        self._ends = (() if sampling.ignore_eos else eos_token_ids) + sampling.stop_token_ids
        self._single_bans = [words[0] for words in sampling.bad_words if len(words) == 1]
        self._bad_words = [words for words in sampling.bad_words if len(words) > 1]
        self.counts: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None
        if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = torch.zeros(vocab_size, device=device)
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[self.tokens] = True
        self._always_masked = self.forbidden is not None or bool(sampling.bad_words) or matcher is not None
        self._always_edited = self._always_masked or self.bias is not None or self.counts is not None or bool(self.processors)

    @property
    def position(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def has_mask(self) -> bool:
        return self._always_masked or self.position < self.sampling.min_tokens

    @property
    def edited(self) -> bool:
        """Whether this step's logits are changed before the draw."""
        return self._always_edited or self.position < self.sampling.min_tokens

    @property
    def error(self) -> str:
        """Why the sequence cannot go on, or "": its grammar has become too slow to follow, or leads nowhere."""
        return self.matcher.error if self.matcher is not None else ""

    def banned(self) -> list[int]:
        """Ids that may not come next because of bad_words and min_tokens."""
        banned = list(self._single_bans)
        output = self.tokens[self.num_prompt :] if self._bad_words else []
        for words in self._bad_words:
            if output[1 - len(words) :] == list(words[:-1]):
                banned.append(words[-1])
        if self.position < self.sampling.min_tokens:
            banned += self._ends
        return banned

    def accept(self, token_id: int) -> None:
        """A token was appended to the output."""
        self.tokens.append(token_id)
        if self.counts is not None and self.seen is not None:
            self.counts[token_id] += 1
            self.seen[token_id] = True
        if self.matcher is not None:
            self.matcher.accept(token_id)


class Sampler:
    """Draws one token for each row of a batch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def sample(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
        """One token for each state. `logits` is [len(states), vocab] of any float type and may be changed. Does not call `accept`."""
        assert logits.shape == (len(states), self._vocab_size) and logits.device.type == self._device.type
        edited = [row for row, state in enumerate(states) if state.edited]
        random = [row for row, state in enumerate(states) if not state.greedy]
        reported = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        if not (edited or random or reported):
            return [Sampled(token, None) for token in logits.argmax(dim=1).tolist()]
        raw = logits[reported].float() if reported else None
        logits = logits.float().contiguous()
        if edited:
            part = take(logits, edited)
            edit(part, [states[row] for row in edited])
            put(logits, edited, part)
        tokens: list[int] = logits.argmax(dim=1).tolist() if len(random) < len(states) else [0] * len(states)
        if random:
            drawn = _draw(take(logits, random), [states[row] for row in random])
            for row, token in zip(random, drawn, strict=True):
                tokens[row] = token
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            counts = [states[row].sampling.logprobs or 0 for row in reported]
            logprobs = dict(zip(reported, _report(raw, [tokens[row] for row in reported], counts), strict=True))
        return [Sampled(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens: `logits` is [N, vocab], `targets[i]` the prompt token that follows position i."""
    report: list[TokenLogprobs] = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        part = targets[start : start + _ROWS_AT_ONCE]
        report += _report(logits[start : start + len(part)].float(), part, [count] * len(part))
    return report


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that draws output token `position`: 53 bits of a hash, the same on every machine."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int]:
    weights = weigh(logits, [Truncation.of(state.sampling) for state in states])
    tokens = [0] * len(states)
    seeded = [row for row, state in enumerate(states) if state.sampling.seed is not None]
    free = [row for row, state in enumerate(states) if state.sampling.seed is None]
    if seeded:
        for row, token in zip(seeded, race(weights, seeded, [(states[row].seed, states[row].position) for row in seeded]), strict=True):
            tokens[row] = token
    if free:
        quantiles = [uniform(states[row].seed, states[row].position) for row in free]
        for row, token in zip(free, quantile(take(weights, free), quantiles), strict=True):
            tokens[row] = token
    return tokens


def _report(logits: torch.Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The chosen token and its `counts[i]` best alternatives. `logits` is float32 [N, vocab]; ties are listed by id."""
    ids = torch.tensor(chosen, device=logits.device).unsqueeze(1)
    values = logits.gather(1, ids)
    norms: list[float] = logits.logsumexp(dim=1).tolist()
    ranks: list[int] = ((logits > values).sum(dim=1) + 1).tolist()
    chosen_values: list[float] = values.squeeze(1).tolist()
    # A few more than asked for, so that ties at the end are cut by id and not by accident.
    best = logits.topk(min(max(counts) + 8, logits.shape[1]), dim=1)
    best_values, best_ids = best.values.tolist(), best.indices.tolist()
    report = []
    for row, (token, value, norm) in enumerate(zip(chosen, chosen_values, norms, strict=True)):
        entries = [_logprob(token, value - norm, ranks[row])]
        alternatives = sorted(zip(best_values[row], best_ids[row], strict=True), key=lambda pair: (-pair[0], pair[1]))
        rank = 1
        for index, (other, token_id) in enumerate(alternatives[: counts[row]]):
            if other < alternatives[index - 1][0]:
                rank = index + 1
            entries.append(_logprob(token_id, other - norm, rank))
        report.append(tuple(entries))
    return report


def _logprob(token_id: int, logprob: float, rank: int) -> Logprob:
    return Logprob(token_id, max(logprob, _LOWEST_LOGPROB), rank)


def _bias(logit_bias: dict[int, float], device: torch.device) -> Bias | None:
    if not logit_bias:
        return None
    ids, values = list(logit_bias), list(logit_bias.values())
    return Bias(torch.tensor(ids, device=device), torch.tensor(values, dtype=torch.float32, device=device))


def _forbidden(allowed: tuple[int, ...], vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """bool [vocab], true for ids that are not allowed; None if all are."""
    if not allowed:
        return None
    forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
    forbidden[list(allowed)] = False
    return forbidden
