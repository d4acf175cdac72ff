"""The budget of reasoning, token by token."""

from collections.abc import Iterable

import pytest

from engine.kit.reasoning import ReasoningProgress
from engine.types import ReasoningBudget

BEGIN, END, LAST, AGAIN = 1, 2, 3, 4
STEPS = {0: {BEGIN: 1}, 1: {END: 0}}


def output(budget: int, wanted: Iterable[int], *, inside: bool = True) -> list[int]:
    """The output of a model that wants to write `wanted`, and continues after its reasoning when that is cut short."""
    progress = ReasoningProgress(ReasoningBudget(budget, (END, LAST), (AGAIN,), inside, STEPS))
    found: list[int] = []
    for token in wanted:
        while (forced := progress.forced) is not None:
            progress.accept(forced)
            found.append(forced)
        progress.accept(token)
        found.append(token)
    return found


@pytest.mark.parametrize(
    ("budget", "inside", "expected"),
    [
        (3, True, [7, 7, 7, END, LAST, 7, 7]),
        (0, True, [END, LAST, 7, 7, 7, 7, 7]),
        (9, True, [7] * 5),
        (2, False, [7] * 5),
    ],
)
def test_the_end_is_forced_when_the_budget_is_spent(budget: int, inside: bool, expected: list[int]) -> None:
    assert output(budget, [7] * 5, inside=inside) == expected


def test_a_budget_is_for_all_regions_of_an_output() -> None:
    assert output(3, [7, 7, END, 8, 8, BEGIN, 7, 7, 8]) == [7, 7, END, 8, 8, BEGIN, 7, END, LAST, 7, 8]
    assert output(2, [7, 7, END, 8]) == [7, 7, END, LAST, END, 8], "the end itself is forced, too"


def test_reasoning_does_not_begin_again_right_after_its_end() -> None:
    progress = ReasoningProgress(ReasoningBudget(0, (END, LAST), (AGAIN,), True, STEPS))
    for token in (END, LAST):
        assert (progress.forced, progress.avoided) == (token, ())
        progress.accept(token)
    assert (progress.forced, progress.avoided) == (None, (AGAIN,))
    progress.accept(8)
    assert progress.avoided == ()


def test_a_token_that_a_guide_requires_ends_the_forced_sequence() -> None:
    progress = ReasoningProgress(ReasoningBudget(0, (END, LAST), (), True, STEPS))
    progress.accept(END)
    progress.accept(8)
    assert progress.forced is None and not progress.inside
