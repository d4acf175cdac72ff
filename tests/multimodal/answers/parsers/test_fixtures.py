"""Outputs of real models, from canitoolcall: every format, as a whole and in a stream."""

import pytest
from canitoolcall.chunking import ChunkStrategy
from canitoolcall.fixtures import Fixture

from tests.support.fixtures_of_calls import FIXTURES, JUDGED_WRONG, chunks, from_text, judge, passes

STRATEGIES = [ChunkStrategy("token"), ChunkStrategy("rand", seed=1, max_group=8)]


def cuts_a_call(fixture: Fixture) -> bool:
    """Whether the output ends inside a call, or a call turns out to be none behind the name."""
    return fixture.expected is None or fixture.id in JUDGED_WRONG


@pytest.mark.parametrize("family", sorted({fixture.family for fixture in FIXTURES.values()}))
def test_whole_calls(family: str) -> None:
    for fixture in FIXTURES.values():
        if fixture.family == family:
            streams = {
                strategy.id: from_text(fixture, chunks(fixture, strategy), whole_calls=True) for strategy in STRATEGIES
            }
            passes(fixture, from_text(fixture, [fixture.raw_output], whole_calls=True), streams)


@pytest.mark.parametrize("family", sorted({fixture.family for fixture in FIXTURES.values()}))
def test_arguments_as_they_come(family: str) -> None:
    for fixture in FIXTURES.values():
        if fixture.family == family and not cuts_a_call(fixture):
            streams = {strategy.id: from_text(fixture, chunks(fixture, strategy)) for strategy in STRATEGIES[:1]}
            passes(fixture, from_text(fixture, [fixture.raw_output]), streams)


def test_few_fixtures_are_judged_wrong() -> None:
    assert len(JUDGED_WRONG) < 10
    assert set(FIXTURES) >= JUDGED_WRONG


def test_a_cut_call_stays_as_far_as_it_went() -> None:
    fixture = FIXTURES["qwen3-hermes/truncated-mid-arguments-no-thinking"]
    _, wrong = judge(fixture, from_text(fixture, [fixture.raw_output]), {})
    assert any("returned 1 tool call" in row for row in wrong)
