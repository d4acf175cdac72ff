"""What the engine reports of prompts, of failed steps and of the steps themselves."""

import torch

from engine.embedded.sampling.sampler import prompt_logprobs
from engine.embedded.sequence import Sequence
from engine.embedded.step import Chunk, PromptRows
from engine.errors import EngineFailure
from engine.stats import InflightBatchingStats
from engine.types import PromptReport


def report_prompts(reported: list[PromptRows], logits: torch.Tensor) -> int:
    """Append the log-probabilities of prompt tokens to their sequences, except those known from before a preemption.

    The first rows of `logits` are those of `reported`; returns how many they are.
    """
    first = 0
    for (sequence, start, *_), _, count in reported:
        assert sequence.prompt_logprobs is not None
        known = max(0, len(sequence.prompt_logprobs) - 1 - start)
        targets = sequence.tokens[start + known + 1 : start + count + 1]
        asked = sequence.request.sampling.prompt_logprobs or 0
        sequence.prompt_logprobs += prompt_logprobs(logits[first + known : first + count], targets, asked)
        first += count
    return first


def prompt_report(sequence: Sequence) -> PromptReport:
    """Return the report that goes out with the first delta of a sequence."""
    assert sequence.first_scheduled is not None
    logprobs = None if sequence.prompt_logprobs is None else tuple(sequence.prompt_logprobs)
    waited = sequence.first_scheduled - sequence.arrival
    return PromptReport(cached_tokens=sequence.cached_tokens, queue_seconds=waited, logprobs=logprobs)


def failure_of(error: Exception) -> EngineFailure:
    """Return the error that a request gets when its step failed."""
    failure = EngineFailure(f"the engine failed on this request: {type(error).__name__}")
    failure.__cause__ = error
    return failure


def batching(chunks: list[Chunk], preempted: int) -> InflightBatchingStats:
    """Return the figures of a step, in which `preempted` sequences were preempted."""
    prefills = [chunk for chunk in chunks if chunk.start + 1 < chunk.sequence.num_prompt]
    decodes = len(chunks) - len(prefills)
    return InflightBatchingStats(
        num_scheduled_requests=len(chunks),
        num_context_requests=len(prefills),
        num_gen_requests=decodes,
        num_paused_requests=preempted,
        num_ctx_tokens=sum(chunk.length for chunk in prefills),
        avg_num_decoded_tokens_per_iter=1.0 if decodes else 0.0,
    )
