"""What the engine says of prompts, of ends and of its steps."""

from collections.abc import Sequence as Sequence_

from engine.embedded.scheduler import Chunk
from engine.embedded.sequence import Sequence
from engine.errors import EngineFailure
from engine.stats import InflightBatchingStats
from engine.types import FinishReason, PromptReport


def prompt_report(sequence: Sequence) -> PromptReport:
    """On the first delta of a sequence."""
    assert sequence.first_scheduled is not None
    logprobs = None if sequence.prompt_logprobs is None else tuple(sequence.prompt_logprobs)
    waited = sequence.first_scheduled - sequence.arrival
    return PromptReport(cached_tokens=sequence.cached_tokens, queue_seconds=waited, logprobs=logprobs)


def ending(
    sequence: Sequence, token: int, eos_token_ids: tuple[int, ...], context_length: int
) -> tuple[FinishReason | None, int | None]:
    """Finish and stop reason of a sequence after `token`, its newest."""
    sampling, count = sequence.request.sampling, sequence.num_output
    if count > sampling.min_tokens:
        if token in sampling.stop_token_ids:
            return "stop", token
        # A grammar lets the end of sequence through only when the output is complete: nothing could follow it.
        if token in eos_token_ids and (sampling.guide is not None or not sampling.ignore_eos):
            return "stop", None
    if count >= sampling.max_tokens or len(sequence.tokens) >= context_length:
        return "length", None
    return None, None


def failure_of(error: Exception) -> EngineFailure:
    """What a request is told of a step that failed."""
    failure = EngineFailure(f"the engine failed on this request: {type(error).__name__}")
    failure.__cause__ = error
    return failure


def batching(chunks: Sequence_[Chunk], preempted: int) -> InflightBatchingStats:
    """Of a step that preempted so many sequences."""
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
