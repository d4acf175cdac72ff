import pytest

from engine.embedded.speculation.costs import Costs, Line
from engine.embedded.speculation.lengths import can_pay, trial, worthwhile

CHEAP, DEAR = Line(1.0, 0.1), Line(0.0, 1.0)
"""A step of one row takes 1.1 s or 1 s, and each further row 0.1 s or as much again."""


def costs(line: Line, longer: float = 0.0) -> Costs:
    """Steps that waited so that they could have drafts take `longer`."""
    return Costs(line, Line(line.base + longer, line.row))


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ([[0.9, 0.8, 0.7]], [3]),
        ([[0.9, 0.05, 0.04]], [1]),  # a token that is right one time in twenty gives less than its row costs
        ([[0.9, 0.8], [0.2, 0.1]], [2, 0]),
        ([[0.9], [0.05]], [1, 0]),
        ([[], []], [0, 0]),
    ],
)
def test_tokens_are_computed_that_raise_the_rate(chances: list[list[float]], expected: list[int]) -> None:
    assert worthwhile(chances, len(chances), costs(CHEAP), 1.0) == expected


def test_nothing_is_computed_where_rows_are_dear_or_the_gain_is_small() -> None:
    sure = [[0.99, 0.98]]
    assert worthwhile(sure, 1, costs(DEAR), 1.0) == [0]
    assert worthwhile(sure, 1, costs(CHEAP), 2.6) == [0] and worthwhile(sure, 1, costs(CHEAP), 2.5) == [2]
    assert worthwhile([[0.3]], 1, costs(CHEAP), 1.0) == [1]
    assert worthwhile([[0.3]], 1, costs(CHEAP, longer=0.3), 1.0) == [0], "a token is sooner there than a step waits"
    assert worthwhile([[0.3]], 1, costs(CHEAP), 1.0, drafting=0.3) == [0]


def test_whether_drafts_can_pay_at_all() -> None:
    assert can_pay(costs(CHEAP), 1, 4, 1.05) and not can_pay(costs(DEAR), 1, 4, 1.05)
    assert can_pay(Costs(Line(0.0, 0.0), DEAR), 1, 4, 1.05), "it is not known yet what a step takes"


def test_a_trial_takes_two_steps_and_needs_as_many_tokens_as_a_step() -> None:
    assert trial([[0.9, 0.8, 0.7]] * 2, [3, 3], 2, costs(Line(0.3, 0.1))) == [3, 3]
    assert trial([[0.9] * 20] * 2, [20, 20], 2, costs(Line(0.3, 0.1))) == [10, 0]
    assert trial([[0.9], [0.2]], [1, 1], 2, costs(CHEAP)) == [0, 0]
