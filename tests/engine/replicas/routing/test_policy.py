"""Choices: overlap against load, ties, temperature; loads; sessions."""

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.replicas.routing.load import Assignment, Load
from engine.replicas.routing.policy import Policy
from engine.replicas.routing.sessions import Sessions


class Candidate(NamedTuple):
    number: int
    load: Load
    last_asked: int


def candidates(*loads: Load) -> list[Candidate]:
    return [Candidate(number, load, 0) for number, load in enumerate(loads)]


@pytest.mark.parametrize(
    ("loads", "overlaps", "expected"),
    [
        ([Load(), Load()], {1: 64}, 1),
        ([Load(1, 0, 100), Load()], {0: 64}, 0),  # a little load does not outweigh a cached prefix
        ([Load(1, 80, 100), Load()], {0: 64}, 1),  # a prompt that waits before does
        ([Load(2, 0, 0), Load(1, 0, 0)], {}, 1),  # equal costs: fewer requests
        ([Load(3, 500, 500), Load(3, 400, 500), Load(3, 450, 500)], {}, 1),
    ],
)
def test_overlap_is_weighed_against_load(loads: list[Load], overlaps: dict[int, int], expected: int) -> None:
    assert Policy("kv").choose(candidates(*loads), 100, overlaps).number == expected


def test_a_weight_moves_the_balance() -> None:
    loads, overlaps = [Load(1, 80, 0), Load()], {0: 64}
    assert Policy("kv", 0.5).choose(candidates(*loads), 100, overlaps).number == 1
    assert Policy("kv", 2.0).choose(candidates(*loads), 100, overlaps).number == 0
    assert Policy("least_loaded").choose(candidates(*loads), 100, overlaps).number == 1


def test_round_robin_takes_turns() -> None:
    policy, last, order = Policy("round_robin"), [0, 0, 0], []
    for turn in range(1, 10):
        chosen = policy.choose([Candidate(number, Load(), last[number]) for number in range(3)], 100, {2: 100}).number
        last[chosen] = turn
        order.append(chosen)
    assert order == [0, 1, 2] * 3


def test_equals_are_chosen_alike() -> None:
    policy = Policy("kv", seed=1)
    counts = Counter(policy.choose(candidates(Load(), Load(), Load(5, 5, 5)), 10, {}).number for _ in range(400))
    assert counts[2] == 0
    assert 150 < counts[0] < 250


def test_temperature_takes_others_sometimes() -> None:
    def share(temperature: float) -> float:
        policy = Policy("kv", temperature=temperature, seed=1)
        return Counter(policy.choose(candidates(Load(), Load()), 100, {0: 64}).number for _ in range(1000))[0] / 1000

    assert share(0) == 1
    assert 0.9 < share(0.3) < 1
    assert 0.5 < share(10.0) < 0.56


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.booleans()), max_size=20))
def test_work_leaves_no_load_behind(works: list[tuple[int, int, bool]]) -> None:
    load = Load()
    begun = [(Assignment(load, prompt, min(overlap, prompt)), answered) for prompt, overlap, answered in works]
    assert load.requests == len(works)
    assert load.prefilling == sum(prompt - min(overlap, prompt) for prompt, overlap, _ in works)
    for work, answered in begun:
        if answered:
            work.answered()
        work.end()
        work.end()
    assert load == Load()


def test_sessions_stay_until_they_are_old() -> None:
    now = 0.0
    sessions = Sessions(2, 10.0, lambda: now)
    sessions.assign("a", "http://one")
    now = 9.0
    assert sessions.replica("a") == "http://one"
    sessions.assign("a", "http://one")
    now = 18.0
    assert sessions.replica("a") == "http://one"
    now = 20.0
    assert sessions.replica("a") is None
    assert sessions.replica("b") is None


def test_sessions_are_bounded() -> None:
    sessions = Sessions(2, 10.0)
    for name in ("a", "b", "a", "c"):
        sessions.assign(name, name)
    assert [sessions.replica(name) for name in ("a", "b", "c")] == ["a", None, "c"]
    assert len(sessions) == 2
