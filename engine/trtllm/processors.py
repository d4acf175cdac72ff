"""Our logits processors in TensorRT-LLM, which pickles them and calls them in its worker processes.

A processor of a request does what the engine's sampler ignores (`engine/trtllm/support.py`), with the results of the
embedded engine (`engine/embedded/sampling/`), which works on batches; a test compares them.
"""

import contextlib
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from engine.kit.logits import Factory, LogitsProcessor
from engine.kit.noise import exponentials
from engine.kit.reasoning import ReasoningProgress
from engine.trtllm.sampling import MASKED
from engine.trtllm.support import Edits, draws

log = logging.getLogger(__name__)


class ProcessorAdapter:
    """Edits one request's logits, for one sequence with one beam: bias, masks, penalties, the processors that the
    request names, and the draw if it has a seed. On errors of those processors, logits are as if they were not there.

    TensorRT-LLM calls it with the prompt alone for each chunk of a prompt; what the last of these calls does counts.
    Every rank of a tensor-parallel group calls its own copy, so all that it does is a function of logits and tokens.
    It can be pickled if its factories can, as module-level classes and functions can.
    """

    def __init__(self, factories: Sequence[Factory], edits: Edits) -> None:
        self._factories = tuple(factories)
        self._edits = edits
        self._state: _Progress | None = None

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None:
        """Change `logits` [beam, 1, vocab] in place. `token_ids` has a list for each beam, prompt included."""
        try:
            if logits.shape[0] != 1 or len(token_ids) != 1:
                raise ValueError(f"logits processors take one beam, not {logits.shape[0]}")
            with _stream(stream_ptr):
                row = logits.view(-1)
                if self._state is None or len(token_ids[0]) <= self._state.length:
                    self._state = _Progress(self._factories, self._edits, token_ids[0], row)
                row.copy_(self._state.edited(token_ids[0], row))
        except Exception:  # on an engine thread, which must not stop
            log.exception("the logits processor of request %s failed and had no effect", req_id)

    def __getstate__(self) -> dict[str, Any]:
        return {"_factories": self._factories, "_edits": self._edits, "_state": None}


class _Progress:
    """One request's tokens so far, what they imply, and its processors."""

    def __init__(self, factories: Sequence[Factory], edits: Edits, token_ids: Sequence[int], row: torch.Tensor) -> None:
        self._edits = edits
        self._sampling = sampling = edits.sampling
        self._num_prompt = len(token_ids) if edits.num_prompt is None else edits.num_prompt
        self._failed = False
        self.length = 0
        self._processors: list[LogitsProcessor] = []
        for factory in factories:
            try:
                self._processors.append(factory())
            except Exception:
                self._failure(factory)
        for known in range(self._num_prompt, len(token_ids)):  # of a prefill replica: processors may keep state
            self._processed(token_ids[:known], torch.zeros_like(row, dtype=torch.float32))
        budget = sampling.reasoning_budget
        self._reasoning = None if budget is None else ReasoningProgress(budget)
        device, size = row.device, len(row)
        self._penalises = (
            sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        self._counts = torch.zeros(size, device=device)
        self._seen = torch.zeros(size, dtype=torch.bool, device=device)
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        self._forbidden: torch.Tensor | None = None
        if sampling.allowed_token_ids:
            self._forbidden = torch.ones(size, dtype=torch.bool, device=device)
            self._forbidden[list(sampling.allowed_token_ids)] = False

    def edited(self, token_ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        """Return the changed logits, float32 [vocab]. Masked ids are `MASKED`: the engine adds the guide's mask."""
        sampling, position = self._sampling, len(token_ids) - self._num_prompt
        self._note(token_ids)
        logits = row.to(torch.float32, copy=True)
        logits.index_add_(0, self._bias_ids, self._bias)
        banned = self._banned(token_ids, position)
        self._mask(logits, banned)
        if self._penalises:
            self._penalise(logits)
        if self._processors:
            logits = self._processed(token_ids, logits)
            self._mask(logits, banned)
        if sampling.guide is None and bool(logits.max() == -math.inf):  # all is masked: the sequence ends
            logits[list(self._edits.eos_token_ids or (0,))] = 0
        if self._reasoning is not None and (forced := self._reasoning.forced) is not None:
            kept = logits[forced].clone().clamp_(min=MASKED)
            logits.fill_(-math.inf)
            logits[forced] = kept
        elif draws(sampling) and (sampling.seed is not None or sampling.min_p > 0):
            weights = weigh(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            if sampling.seed is None:
                logits.masked_fill_(weights == 0, -math.inf)
            else:
                token = draw(weights, sampling.seed, position)
                logits.fill_(-math.inf)
                logits[token] = 0
        return logits.clamp_(min=MASKED)

    def _note(self, token_ids: Sequence[int]) -> None:
        """Count the tokens that are new since the last call."""
        new, first_output = token_ids[self.length :], max(self.length, self._num_prompt)
        self.length = len(token_ids)
        if self._reasoning is not None:
            for token in token_ids[first_output:]:
                self._reasoning.accept(token)
        if self._penalises and new:
            self._seen[torch.tensor(new, device=self._seen.device)] = True
            if output := token_ids[first_output:]:
                ids = torch.tensor(output, device=self._counts.device)
                self._counts.index_add_(0, ids, torch.ones(len(output), device=ids.device))

    def _banned(self, token_ids: Sequence[int], position: int) -> list[int]:
        """Return the ids that may not come next because of bad_words and min_tokens."""
        sampling, banned = self._sampling, []
        output = token_ids[self._num_prompt :] if sampling.bad_words else ()
        for *start, last in sampling.bad_words:
            if not start or list(output[-len(start) :]) == start:
                banned.append(last)
        if self._reasoning is not None:
            banned += self._reasoning.avoided
        if position < sampling.min_tokens:
            banned += [*(() if sampling.ignore_eos else self._edits.eos_token_ids), *sampling.stop_token_ids]
        return banned

    def _mask(self, logits: torch.Tensor, banned: list[int]) -> None:
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, -math.inf)
        if banned:
            logits[banned] = -math.inf

    def _penalise(self, logits: torch.Tensor) -> None:
        """Apply the repetition penalty to prompt and output, then those of presence and frequency to the output."""
        sampling = self._sampling
        repetition = torch.tensor(sampling.repetition_penalty, device=logits.device)
        divisor = torch.where(logits > 0, repetition, 1 / repetition)
        logits.div_(divisor.masked_fill_(~self._seen, 1))
        logits.sub_(sampling.frequency_penalty * self._counts).sub_(sampling.presence_penalty * (self._counts > 0))

    def _processed(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Run the processors that the request names: code that is not ours. One that raises has no effect."""
        for processor in self._processors:
            copy = logits.clone()
            try:
                processor(token_ids, copy)
                if bool(copy.isnan().any()):
                    raise ValueError("it wrote NaN")
            except Exception:
                self._failure(type(processor))
            else:
                logits = copy
        return logits

    def _failure(self, processor: Factory) -> None:
        """Log the exception that is being handled, if it is the request's first."""
        if not self._failed:
            log.exception("logits processor %s failed and had no effect", getattr(processor, "__name__", processor))
        self._failed = True


def weigh(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return the probabilities of a row, float32 [vocab], after temperature and truncation, not normalised: 1 for the
    likeliest token, 0 for those cut. Tokens that tie with the last one kept are kept.
    """
    scaled = (logits - logits.max()) / temperature
    weights = scaled.exp()
    best = scaled.sort(descending=True).values
    threshold = torch.full_like(best[0], -math.inf)
    if 0 < top_k < len(best):
        threshold = best[top_k - 1]
    if top_p < 1:
        goal = weights.masked_fill(scaled < threshold, 0).sum() * top_p
        last = int(torch.searchsorted(best.exp().cumsum(0), goal))
        threshold = torch.maximum(threshold, best[min(last, len(best) - 1)])
    return weights.masked_fill_((scaled < threshold) | (weights < min_p), 0)


def draw(weights: torch.Tensor, seed: int, position: int) -> int:
    """Return the token that wins the exponential race with the noise of a seed and a position in the output."""
    noise = torch.from_numpy(exponentials(seed, position, len(weights))).to(weights.device)
    return int((weights / noise).argmax())


def _stream(pointer: int | None) -> contextlib.AbstractContextManager[Any]:
    """Use the engine's CUDA stream, so that the change is ordered before its next operation."""
    return contextlib.nullcontext() if pointer is None else torch.cuda.stream(torch.cuda.ExternalStream(pointer))  # type: ignore[no-untyped-call]
