"""The budget of reasoning as a mask, alone and with a guide."""

import pytest
import torch

from engine.embedded.grammar.compiler import Matcher, new_bitmask
from engine.embedded.grammar.library import Bitmask
from engine.embedded.sampling.reasoning import ReasoningMatcher
from engine.types import ReasoningBudget

VOCABULARY = 70
STOP = 2


class Only:
    """The grammar of any number of some tokens, as a `Compiled` and as its own `Position`."""

    num_bytes = 0
    error = ""

    def __init__(self, *token_ids: int) -> None:
        self._allowed = token_ids

    def start(self) -> "Only":
        return self

    def fill(self, bitmask: Bitmask, row: int) -> None:
        bitmask[row] = 0
        for token in self._allowed:
            bitmask.view("uint32")[row, token // 32] |= 1 << token % 32

    def allows(self, token_id: int) -> bool:
        return token_id in self._allowed

    def accept(self, token_id: int) -> bool:
        return token_id in self._allowed

    def may_end(self) -> bool:
        return False


def allowed(matcher: ReasoningMatcher) -> set[int]:
    bitmask: torch.Tensor = new_bitmask(2, VOCABULARY)
    matcher.fill(bitmask, 1)
    assert bitmask[0].eq(-1).all(), "another row"
    found = {token for token in range(VOCABULARY) if int(bitmask[1, token // 32]) >> token % 32 & 1}
    assert {token for token in range(VOCABULARY) if matcher.allows(token)} == found
    return found


@pytest.mark.parametrize("close", [(31, 32), (63, 64)])
def test_a_budget_alone_allows_all_but_what_is_forced_or_avoided(close: tuple[int, int]) -> None:
    matcher = ReasoningMatcher(ReasoningBudget(1, close, (63, 31), True, {1: {close[0]: 0}}), None)
    for expected, token in ((set(range(VOCABULARY)), 7), ({close[0]}, close[0]), ({close[1]}, close[1])):
        assert allowed(matcher) == expected
        assert matcher.accept(token)
    assert allowed(matcher) == set(range(VOCABULARY)) - {31, 63}
    assert matcher.accept(5)
    assert allowed(matcher) == set(range(VOCABULARY))


def test_with_a_guide_only_what_it_allows_is_forced() -> None:
    budget = ReasoningBudget(0, (31, 8), (), True, {1: {31: 0}})
    guided = ReasoningMatcher(budget, Matcher((STOP,), Only(7, 31, 40)))
    assert allowed(guided) == {31} and guided.accept(31)
    assert allowed(guided) == {7, 31, 40}, "the guide has no 8"
    assert guided.accept(40) and not guided.accept(8) and not guided.error
    late = ReasoningMatcher(budget, Matcher((STOP,)))
    late.begin(Only(31))
    assert allowed(late) == {31}
