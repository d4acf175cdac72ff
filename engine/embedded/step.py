"""Chunks, which the scheduler makes, and the step input that a model runner gets of them."""

from collections.abc import Sequence as Many
from itertools import accumulate
from typing import NamedTuple

import torch

from engine.embedded.models.runner import EmbeddingRows, StepInput
from engine.embedded.sequence import Sequence, SequenceStatus


class Chunk(NamedTuple):
    """`tokens[start : start + length]` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int
    sampled: int
    """Number of tokens sampled after the step: 0 unless the chunk reaches the last token, one more for each token of
    its draft."""
    admission: int
    """The sequence's, when the chunk was made."""
    draft: Many[int] = ()
    """Drafted tokens, the last of the `length`: with their keys and values they count once they prove right."""

    @classmethod
    def next_of(cls, sequence: Sequence, length: int) -> "Chunk":
        start = sequence.computed
        return cls(sequence, start, length, int(start + length == sequence.length), sequence.admission)

    @property
    def current(self) -> bool:
        """Whether the sequence still has what the chunk computed."""
        return self.sequence.admission == self.admission and self.sequence.status is SequenceStatus.RUNNING


class PromptRows(NamedTuple):
    """The first `num_rows` rows of a chunk predict prompt tokens whose log-probabilities are wanted."""

    chunk: Chunk
    row: int
    """The chunk's first flat row."""
    num_rows: int


def prompt_rows(chunks: list[Chunk]) -> list[PromptRows]:
    """Return the rows of a step that predict prompt tokens to report on."""
    if all(chunk.sequence.prompt_logprobs is None for chunk in chunks):
        return []
    found, row = [], 0
    for chunk in chunks:
        count = min(chunk.length, chunk.sequence.num_prompt - 1 - chunk.start)
        if count > 0 and chunk.sequence.wants_prompt_logprobs:
            found.append(PromptRows(chunk, row, count))
        row += chunk.length
    return found


def step_input(chunks: list[Chunk], reported: list[PromptRows], dtype: torch.dtype, device: torch.device) -> StepInput:
    """Build the input of a step from its chunks, those of one token first. Embeddings of images are converted and moved
    as given.

    Logits are wanted of the rows in `reported`, and then of the rows that tokens are sampled from, both in the order of
    chunks.
    """
    sequences, starts, lengths, sampled, admissions, _ = zip(*chunks, strict=True)
    singles = lengths.count(1)
    # The pending token of a slot stands for what the host has not seen yet.
    tokens = [
        sequence.tokens[start] if start < len(sequence.tokens) else -1 - sequence.slot
        for sequence, start in zip(sequences[:singles], starts, strict=False)
    ]
    positions = list(starts[:singles])
    for sequence, start, length, _, _, draft in chunks[singles:]:
        assert length > 1, "chunks of one token come first"
        tokens += sequence.tokens[start : start + length]
        tokens += draft
        positions += range(start, start + length)
    assert len(tokens) == len(positions), "only a decode computes a pending token"
    rows = [row for report in reported for row in range(report.row, report.row + report.num_rows)]
    if sum(sampled) == len(tokens):
        rows += range(len(tokens))
    else:
        for end, count in zip(accumulate(lengths), sampled, strict=True):
            rows += range(end - count, end)
    with_images = any(sequence.images is not None for sequence in sequences)
    return StepInput(
        tokens=tokens,
        positions=positions,
        starts=starts,
        lengths=lengths,
        slots=[sequence.slot for sequence in sequences],
        admissions=admissions,
        tables=[sequence.tables for sequence in sequences],
        sampled=sampled,
        rows=rows,
        embeddings=_embedding_rows(chunks, dtype, device) if with_images else None,
        rope_positions=_rope_positions(chunks) if with_images else None,
    )


def lacking_embeddings(chunks: list[Chunk]) -> list[Chunk]:
    """Return the chunks that cannot be computed because the embeddings of their images are missing."""
    return [
        chunk
        for chunk in chunks
        if (images := chunk.sequence.images) is not None and images.missing(chunk.start, chunk.length)
    ]


def note_pending(chunks: list[Chunk], change: int) -> None:
    """Count the tokens that a step samples as under way (`change` 1) or as arrived (-1): one for each sequence, since
    nothing is scheduled before a draft has been checked."""
    for chunk in chunks:
        if chunk.sampled:
            chunk.sequence.pending += change
            chunk.sequence.sampler.pending = chunk.sequence.pending


def _embedding_rows(chunks: list[Chunk], dtype: torch.dtype, device: torch.device) -> EmbeddingRows | None:
    rows: list[int] = []
    values: list[torch.Tensor] = []
    row = 0
    for chunk in chunks:
        if chunk.sequence.images is not None:
            for places, embeddings in chunk.sequence.images.rows(chunk.start, chunk.length, dtype, device):
                rows += [row + place for place in places]
                values.append(embeddings)
        row += chunk.length
    return EmbeddingRows(rows, torch.cat(values)) if values else None


def _rope_positions(chunks: list[Chunk]) -> torch.Tensor | None:
    """Positions in time, height and width, int64 [3, tokens]; None for models without mRoPE."""
    if not any(images.uses_mrope for chunk in chunks if (images := chunk.sequence.images) is not None):
        return None
    parts = [
        torch.arange(chunk.start, chunk.start + chunk.length).expand(3, -1)
        if chunk.sequence.images is None
        else chunk.sequence.images.rope_positions(chunk.start, chunk.length)
        for chunk in chunks
    ]
    return torch.cat(parts, 1)
