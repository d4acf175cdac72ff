"""Steps that a device runs behind the last blocks of a handoff, before anybody knows whether these were still held."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.embedded.handoff import leases
from engine.embedded.handoff.words import LeaseWords
from engine.kv_events import Stored
from engine.types import Delta
from tests.engine.embedded.handoff.test_two_cores import LONGEST, SMALL, alone, greedy_requests, prompt_of
from tests.support.handoff import Controlled, Fate, Pair, pair_of, request_of, said, sequence_of, step, tokens

PROMPT = prompt_of(50)
REQUEST = request_of("a", PROMPT)
OTHER = request_of("other", prompt_of(20))


ARRIVE = Fate(Controlled.copy)
LOST = Fate(Controlled.scribble)
"""The other replica has given the blocks up: neither they nor the word are what they were."""
DEAD = Fate(Controlled.scribble, "the peer died")
LATE = Fate(Controlled.scribble, late=True)
"""Wrong bytes come late: behind what the engine has given a device meanwhile, were it not for its waiting."""
FATES = {"arrive": ARRIVE, "lost": LOST, "dead": DEAD}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    return {name: tokens(deltas) for name, deltas in alone(tiny_model, [REQUEST, OTHER]).items()}


@pytest.fixture
def pair(overlap: str, tiny_model: Path) -> Iterator[Pair]:
    with pair_of(tiny_model, {**SMALL, "overlap_scheduler": overlap}) as pair:
        yield pair


@pytest.fixture(autouse=True)
def followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseWords, "follow", lambda *_: None)


def stored(pair: Pair) -> int:
    return sum(len(event.data.blocks) for event in pair.events if isinstance(event.data, Stored))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("fate", FATES.values(), ids=FATES)
def test_only_blocks_that_were_still_held_count(
    pair: Pair, expected: dict[str, list[int]], fate: Fate, beside: bool
) -> None:
    pair.control(lambda: fate)
    other: list[Delta] = []
    if beside:
        pair.decode.add(sequence_of(pair.decode, OTHER))
        while len(other) < 4:
            other += [delta for _, delta in step(pair.decode)]
    handed = pair.begin(REQUEST)
    deltas = pair.finish()
    assert said(handed, deltas["a"]) == expected["a"]
    assert pair.transfers == (int(fate is ARRIVE), int(fate is not ARRIVE))
    if beside:
        assert tokens(other + deltas["other"]) == expected["other"]
    pair.decode.add(sequence_of(pair.decode, replace(REQUEST, request_id="b")))
    again = pair.finish()["b"]
    assert tokens(again) == expected["a"], "no wrong block became reusable"
    assert again[0].prompt is not None and again[0].prompt.cached_tokens == 48, "the right ones did"


def test_blocks_become_reusable_once_they_are_confirmed(pair: Pair) -> None:
    pair.control(lambda: ARRIVE)
    pair.begin(REQUEST)
    while not step(pair.decode):
        assert not stored(pair)
    step(pair.decode)
    assert stored(pair) == len(PROMPT) // 8
    pair.finish()


@pytest.mark.parametrize("fate", FATES.values(), ids=FATES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_abort_leaves_nothing(pair: Pair, expected: dict[str, list[int]], fate: Fate, steps: int) -> None:
    pair.control(lambda: fate)
    pair.begin(REQUEST)
    for _ in range(steps):
        step(pair.decode)
    pair.decode.abort("a")
    pair.finish()
    pair.check_clean()
    assert pair.transfers == (int(fate is ARRIVE), int(fate is not ARRIVE)), "counted all the same"
    pair.decode.add(sequence_of(pair.decode, replace(REQUEST, request_id="b")))
    assert tokens(pair.finish()["b"]) == expected["a"]


def test_blocks_are_not_read_into_before_late_copies_to_them_have_ended(
    tiny_model: Path, overlap: str, expected: dict[str, list[int]]
) -> None:
    options = {**SMALL, "overlap_scheduler": overlap}
    fates = [LATE, ARRIVE]
    with pair_of(tiny_model, options, {**options, "num_blocks": 10}) as pair:
        pair.control(lambda: fates.pop(0))
        pair.begin(request_of("first", prompt_of(50)))
        step(pair.decode)
        pair.decode.abort("first")
        handed = pair.begin(REQUEST)
        assert said(handed, pair.finish()["a"]) == expected["a"] and not fates


def test_a_reset_of_the_prefix_cache_covers_the_unconfirmed(pair: Pair, expected: dict[str, list[int]]) -> None:
    pair.control(lambda: ARRIVE)
    handed = pair.begin(REQUEST)
    step(pair.decode)
    pair.decode.reset_prefix_cache()
    assert said(handed, pair.finish()["a"]) == expected["a"]
    pair.decode.add(sequence_of(pair.decode, replace(REQUEST, request_id="b")))
    again = pair.finish()["b"]
    assert tokens(again) == expected["a"]
    assert again[0].prompt is not None and again[0].prompt.cached_tokens == 0


def test_drafts_from_blocks_that_were_lost_do_not_count(tiny_model: Path, expected: dict[str, list[int]]) -> None:
    options = {**SMALL, "overlap_scheduler": "on", "speculative": "ngram"}
    with pair_of(tiny_model, SMALL, options) as pair:
        pair.control(lambda: LOST)
        handed = pair.begin(REQUEST)
        assert said(handed, pair.finish()["a"]) == expected["a"]


@pytest.fixture(scope="module")
def expected_of_many(tiny_model: Path) -> dict[str, list[int]]:
    return {name: tokens(found) for name, found in alone(tiny_model, greedy_requests()).items()}


@pytest.mark.parametrize("early", [False, True], ids=["at the end", "early"])
def test_many_of_all_fates_get_the_tokens_of_one_core(
    tiny_model: Path,
    overlap: str,
    early: bool,
    expected_of_many: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks are so few that sequences are preempted, some of them before their blocks are confirmed."""
    monkeypatch.setattr(leases, "EARLY_TOKENS", 1)
    rng = random.Random(overlap + str(early))
    fates: list[Fate] = []

    def draw() -> Fate:
        fates.append(rng.choice([ARRIVE, ARRIVE, LOST, DEAD]))
        return fates[-1]

    options: dict[str, Any] = {**SMALL, "overlap_scheduler": overlap, "max_num_tokens": 64}
    with pair_of(tiny_model, options, {**options, "num_blocks": LONGEST // 8 + 4}) as pair:
        pair.control(draw)
        deltas = pair.serve(greedy_requests(), early=early)
        assert pair.transfers == (fates.count(ARRIVE), len(fates) - fates.count(ARRIVE))
        assert min(pair.transfers) > 2 and pair.decode.stats().num_preemptions > 0
    assert {name: tokens(found) for name, found in deltas.items()} == expected_of_many
