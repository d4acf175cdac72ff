"""State of sampling for one sequence: what its request asks for, its tokens, and its place in its grammar."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.embedded.grammar.compiler import Matcher
from engine.embedded.sampling.reasoning import ReasoningMatcher
from engine.errors import InvalidRequest
from engine.kit.logits import create
from engine.types import SamplingParams

_log = logging.getLogger(__name__)


class Bias(NamedTuple):
    ids: torch.Tensor
    """int64 [k]"""
    values: torch.Tensor
    """float32 [k]"""


class Occurrences(NamedTuple):
    """Occurrences of token ids, in host memory: only ids that have occurred are sent to a device."""

    counts: NDArray[np.float32]
    """[vocab]: how often each id is in the output."""
    seen: NDArray[np.bool_]
    """[vocab]: whether it is in the prompt or the output."""


class SamplerState:
    """State of sampling for one sequence. Built once on admission, kept through preemption.

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
        self._vocab_size = vocab_size
        self._device = device
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        budget = sampling.reasoning_budget
        self.matcher = matcher if budget is None else ReasoningMatcher(budget, matcher)
        """Says which tokens may come next: by the guide, by the budget of reasoning."""
        self.tokens = list(prompt)
        self.num_prompt = len(self.tokens)
        self.pending = 0
        self.processors = [create(name) for name in sampling.processors]
        self._processor_failed = False
        # top_k 1 is greedy too: the lowest id wins a tie, where truncation would keep both.
        self.greedy = sampling.temperature == 0 or sampling.top_k == 1
        self.ends = (() if sampling.ignore_eos else eos_token_ids) + sampling.stop_token_ids
        """Ids that do not come before there are `min_tokens`."""
        self._single_bans = [words[0] for words in sampling.bad_words if len(words) == 1]
        self._bad_words = [words for words in sampling.bad_words if len(words) > 1]
        self.penalised = bool(
            sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        )
        self.biased = bool(sampling.logit_bias or sampling.allowed_token_ids or self._single_bans)
        """Whether something is added to the same logits for every token; -inf, if that bans an id."""
        self._excludes = bool(sampling.allowed_token_ids or sampling.bad_words)
        self._always_masked = self._excludes or self.matcher is not None
        self._always_edited = (
            self._always_masked or bool(sampling.logit_bias) or self.penalised or bool(self.processors)
        )
        truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._untruncated_guide = self.matcher is not None and (self.greedy or not truncated)
        self.plain = self.greedy and not self._always_edited and not sampling.min_tokens and sampling.logprobs is None
        """Whether the token is the one with the largest logit, and that is all."""
        self.by_reference = bool(self._bad_words or self.processors)
        """Whether only the reference sampler has what the request asks for."""
        self.by_host = self.matcher is not None or self.by_reference
        """Whether the next token cannot be sampled before the host has seen the last one, by any sampler."""
        self.needs_history = self.by_host or self.penalised
        """Whether the reference sampler cannot sample the next token before the host has seen the last one."""

    @cached_property
    def bias(self) -> Bias | None:
        return _bias(self.sampling.logit_bias, self._device)

    @cached_property
    def forbidden(self) -> torch.Tensor | None:
        """True for ids that are not allowed, bool [vocab]; None if all are."""
        return _forbidden(self.sampling.allowed_token_ids, self._vocab_size, self._device)

    @cached_property
    def occurrences(self) -> Occurrences | None:
        """Occurrences for penalties; None without penalties. Computed on first use: the GPU's sampler never needs
        them."""
        if not self.penalised:
            return None
        counts = np.bincount(np.array(self.tokens[self.num_prompt :], np.int64), minlength=self._vocab_size)
        seen = np.zeros(self._vocab_size, np.bool_)
        seen[self.tokens] = True
        return Occurrences(counts.astype(np.float32), seen)

    @property
    def position(self) -> int:
        """Number of output tokens so far, a pending one included."""
        return len(self.tokens) + self.pending - self.num_prompt

    @property
    def _may_not_end(self) -> bool:
        """Whether there are fewer tokens than `min_tokens`."""
        return self.position < self.sampling.min_tokens

    @property
    def has_mask(self) -> bool:
        return self._always_masked or self._may_not_end

    @property
    def may_mask_all(self) -> bool:
        """Whether the masks of this step, if it has any, may leave nothing: a grammar alone leaves something."""
        return self._excludes or bool(self.processors) or self._may_not_end

    @property
    def draws_before_mask(self) -> bool:
        """Whether a token can be drawn without the grammar's mask, and stands if the grammar allows it.

        Only what the mask leaves is truncated, so truncated text needs the mask first; so does one whose other masks
        may contradict it."""
        return self._untruncated_guide and not self.may_mask_all

    @property
    def edited(self) -> bool:
        """Whether this step's logits are changed before the draw."""
        return self._always_edited or self._may_not_end

    @property
    def error(self) -> str:
        """Reason why the sequence cannot go on, or "": its grammar has become too slow to follow, or leads nowhere."""
        return self.matcher.error if self.matcher is not None else ""

    def banned(self) -> list[int]:
        """Return the ids that may not come next because of bad_words and min_tokens."""
        banned = list(self._single_bans)
        output = self.tokens[self.num_prompt :] if self._bad_words else []
        for words in self._bad_words:
            if output[1 - len(words) :] == list(words[:-1]):
                banned.append(words[-1])
        if self._may_not_end:
            banned += self.ends
        return banned

    def process(self, logits: torch.Tensor) -> None:
        """Run the request's processors on copies of its row, float32 [vocab]. Their code is not ours: one that raises
        has no effect, and that is all."""
        token_ids = tuple(self.tokens)
        for processor in self.processors:
            copy = logits.clone()
            try:
                processor(token_ids, copy)
                if bool(copy.isnan().any()):
                    raise ValueError("the processor wrote NaN")
            except Exception:
                if not self._processor_failed:
                    _log.exception(
                        "logits processor %s failed; its request goes on without it", type(processor).__name__
                    )
                self._processor_failed = True
            else:
                logits.copy_(copy)

    def accept(self, token_id: int) -> None:
        """Note that a token was appended to the output."""
        self._note(token_id)
        if self.matcher is not None:
            accepted = self.matcher.accept(token_id)
            assert accepted, f"token {token_id} was sampled against the grammar"

    def resume(self, token_id: int) -> None:
        """Accept a first token that was sampled elsewhere. Logits processors are called for it with meaningless
        logits, since they may keep state. Raises InvalidRequest if the grammar does not allow it."""
        if self.matcher is not None and not self.matcher.accept(token_id):
            raise InvalidRequest("the handoff's token is not one that the guide allows", "handoff")
        if self.processors:
            self.process(torch.zeros(self._vocab_size, device=self._device))
        self._note(token_id)

    def _note(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if (occurrences := self.__dict__.get("occurrences")) is not None:
            occurrences.counts[token_id] += 1
            occurrences.seen[token_id] = True


def _bias(logit_bias: dict[int, float], device: torch.device) -> Bias | None:
    if not logit_bias:
        return None
    ids, values = list(logit_bias), list(logit_bias.values())
    return Bias(torch.tensor(ids, device=device), torch.tensor(values, dtype=torch.float32, device=device))


def _forbidden(allowed: tuple[int, ...], vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """Return a mask, bool [vocab], that is true for ids that are not allowed; None if all are."""
    if not allowed:
        return None
    forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
    forbidden[list(allowed)] = False
    return forbidden
