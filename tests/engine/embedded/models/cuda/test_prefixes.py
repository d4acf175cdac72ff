"""Which prefixes decodes share, by their tables of blocks."""

import numpy as np
import pytest

from engine.embedded.models.cuda import prefixes
from engine.embedded.models.cuda.prefixes import SharedPrefix, SharedPrefixes

SIZE = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", 8)
    monkeypatch.setattr(prefixes, "LEAST_SEQUENCES", 2)


def tables(*rows: list[int]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], dtype=np.int32)


def test_prefixes_end_with_the_first_block_that_differs() -> None:
    blocks = tables([1, 2, 3, 4], [9, 8, 7, 6], [1, 2, 3, 5, 6], [9, 8, 5, 6], [1, 2, 3, 4, 7])
    finder = SharedPrefixes(blocks, SIZE)
    assert finder.find([0, 1, 2, 3, 4], [0] * 5, [14, 15, 19, 14, 18]) == [
        SharedPrefix([0, 2, 4], 12),
        SharedPrefix([1, 3], 8),
    ]
    assert finder.find([4, 3, 2], [0] * 3, [18, 14, 19]) == [SharedPrefix([0, 2], 12)], "rows are those of a step"


def test_a_prefix_has_no_tokens_at_positions_of_the_step() -> None:
    blocks = tables([1, 2, 3, 4], [1, 2, 3, 4])
    assert SharedPrefixes(blocks, SIZE).find([0, 1], [0, 0], [15, 12]) == [SharedPrefix([0, 1], 12)]
    assert SharedPrefixes(blocks, SIZE).find([0, 1], [0, 0], [15, 11]) == [SharedPrefix([0, 1], 8)]
    assert SharedPrefixes(blocks, SIZE).find([0, 1], [0, 0], [15, 7]) == []


def test_sequences_with_an_equal_block_after_different_ones_do_not_share() -> None:
    blocks = tables([1, 2, 3], [7, 2, 3], [1, 2, 5])
    assert SharedPrefixes(blocks, SIZE).find([0, 1, 2], [0] * 3, [11] * 3) == [SharedPrefix([0, 2], 8)]
    assert SharedPrefixes(blocks, SIZE).find([0, 1], [0] * 2, [11] * 2) == []


def test_tables_are_searched_again_for_other_sequences_alone() -> None:
    blocks = tables([1, 2, 3], [1, 2, 4], [5, 6, 7])
    finder = SharedPrefixes(blocks, SIZE)
    assert finder.find([0, 1], [3, 4], [11, 11]) == [SharedPrefix([0, 1], 8)]
    blocks[1] = 9
    assert not finder.changed([0, 1], [3, 4]) and finder.find([0, 1], [3, 4], [12, 12]) == [SharedPrefix([0, 1], 8)]
    assert finder.changed([0, 1], [3, 5]) and finder.find([0, 1], [3, 5], [12, 12]) == []
