"""Step inputs by hand, for tests of model runners."""

from itertools import accumulate
from typing import Any, NamedTuple

from engine.embedded.models.runner import EmbeddingRows, StepInput


class Part(NamedTuple):
    """`tokens[start : start + length]` of a sequence whose blocks are those of `table` in every group of layers."""

    tokens: list[int]
    table: list[int]
    start: int
    length: int
    slot: int = 0
    sampled: int = 1

    def changed(self, **fields: Any) -> "Part":
        """Return a copy with other values of these fields."""
        return self._replace(**fields)


def step_of(
    parts: list[Part], rows: list[int] | None = None, groups: int = 1, embeddings: EmbeddingRows | None = None
) -> StepInput:
    """Put sequences side by side, those of one token first, in the given order.

    Without `rows`, the logits of every row are wanted. Block 7 may belong to one sequence in one step and to another in
    the next: admissions follow from the tables.
    """
    assert [part.length > 1 for part in parts] == sorted(part.length > 1 for part in parts)
    flat = [token for part in parts for token in part.tokens[part.start : part.start + part.length]]
    assert len(flat) == sum(part.length for part in parts)
    return StepInput(
        tokens=flat,
        positions=[position for part in parts for position in range(part.start, part.start + part.length)],
        starts=[part.start for part in parts],
        lengths=[part.length for part in parts],
        slots=[part.slot for part in parts],
        admissions=[1 + hash(tuple(part.table)) % (1 << 30) for part in parts],
        tables=[[part.table] * groups for part in parts],
        sampled=[part.sampled for part in parts],
        rows=list(range(len(flat))) if rows is None else rows,
        embeddings=embeddings,
    )


def last_rows(parts: list[Part]) -> list[int]:
    """Return the flat row of each sequence's last token."""
    return [end - 1 for end in accumulate(part.length for part in parts)]
