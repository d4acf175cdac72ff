"""Which flat rows of a step need logits: those of the last tokens, and those that predict prompt tokens to report on."""

from collections.abc import Sequence

import torch

from engine.embedded.sampling.sampler import prompt_logprobs
from engine.embedded.scheduler import Chunk


def sample_rows(chunks: Sequence[Chunk]) -> list[int]:
    """The flat row of the last token of every chunk that samples."""
    rows, row = [], -1
    for chunk in chunks:
        row += chunk.length
        if chunk.samples:
            rows.append(row)
    return rows


def prompt_rows(chunks: Sequence[Chunk]) -> list[int]:
    """The flat rows that predict prompt tokens whose log-probabilities are wanted."""
    rows: list[int] = []
    row = 0
    for chunk in chunks:
        rows += range(row, row + _reported(chunk))
        row += chunk.length
    return rows


def _reported(chunk: Chunk) -> int:
    """How many rows of a chunk predict prompt tokens to report on."""
    sequence = chunk.sequence
    return min(chunk.length, sequence.num_prompt - 1 - chunk.start) if sequence.wants_prompt_logprobs else 0


def report_prompts(chunks: Sequence[Chunk], logits: torch.Tensor) -> int:
    """Append the log-probabilities of prompt tokens, skipping those known from before a preemption; how many rows that took."""
    first = 0
    for chunk in chunks:
        count = _reported(chunk)
        if count <= 0:
            continue
        sequence = chunk.sequence
        assert sequence.prompt_logprobs is not None
        known = max(0, len(sequence.prompt_logprobs) - 1 - chunk.start)
        targets = sequence.tokens[chunk.start + known + 1 : chunk.start + count + 1]
        asked = sequence.request.sampling.prompt_logprobs or 0
        sequence.prompt_logprobs += prompt_logprobs(logits[first + known : first + count], targets, asked)
        first += count
    return first
