"""Drafters: what they propose, and what they keep."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.embedded.speculation.answers import Answers, Automaton
from engine.embedded.speculation.drafter import NOTHING, classes_of_match
from engine.embedded.speculation.lookup import Lookup
from engine.types import GenerateRequest, SamplingParams

WORDS = list(range(100, 140))


def sequence(prompt: list[int], prediction: tuple[int, ...] = (), salt: str = "", name: str = "one") -> Sequence:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    request = GenerateRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=params, prediction=prediction, cache_salt=salt
    )
    state = SamplerState(params, prompt, (2,), 0, None, 384, torch.device("cpu"))
    return Sequence(request=request, sampler=state, rank=0.0, arrival=0.0, tokens=list(prompt))


def test_lookup_proposes_the_tokens_after_the_longest_match() -> None:
    lookup = Lookup(2)
    one = sequence([1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3])
    assert lookup.draft([one], [2])[0].tokens == [4, 9], "1, 2, 3 is longer than the later 2, 3"
    one.tokens.append(5)
    assert lookup.draft([one], [4])[0].tokens == [9, 1, 2, 3], "what came is another match"
    one.tokens += [7, 8]
    assert lookup.draft([one], [4]) == [NOTHING]


def test_a_failed_match_is_found_again_after_the_edit() -> None:
    """Both places have the same 2 tokens before them; the one behind the last match is the better guess."""
    lookup = Lookup(2)
    first, second = [5, 6, 7], [5, 6, 8]
    one = sequence([*first, 20, 21, 22, *second, 23, 24, 25, *first])
    lookup.draft([one], [1])
    one.tokens += [20, 21, 30, 5, 6]
    assert lookup.draft([one], [1])[0].tokens == [8]


def test_a_text_that_repeats_is_taken_to_go_on() -> None:
    assert Lookup(2).draft([sequence([9, 4, 5, 6, 4, 5, 6, 4, 5])], [8])[0].tokens == [6, 4, 5, 6, 4, 5, 6, 4]


def test_a_prediction_is_followed_from_the_first_token_on() -> None:
    lookup = Lookup(2)
    one = sequence([1, 2, 3], prediction=tuple(WORDS))
    assert lookup.draft([one], [3])[0].tokens == WORDS[:3]
    one.tokens += [*WORDS[:4], 7, *WORDS[6:8]]
    draft = lookup.draft([one], [3])[0]
    assert draft.tokens == WORDS[8:11], "it goes on behind the edit"


def test_the_longer_the_match_the_surer_the_token() -> None:
    draft = Lookup(2).draft([sequence([*WORDS, 1, *WORDS[:3]])], [16])[0]
    assert draft.tokens == WORDS[3:19] and draft.classes == sorted(draft.classes)
    assert (draft.classes[0], draft.classes[-1]) == (0, 3)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 3), st.integers(1, 9))
def test_proposals_are_what_followed_an_equal_end(tokens: list[int], least: int, limit: int) -> None:
    """Against a search without any index."""
    lookup, one = Lookup(least), sequence([3])
    for token in tokens:
        one.tokens.append(token)
        [draft] = lookup.draft([one], [limit])
        text = one.tokens
        places = [i for i in range(least, len(text)) if text[i - least : i] == text[-least:]]
        assert bool(draft.tokens) == bool(places)
        assert len(draft.tokens) == (limit if places else 0)
        assert not places or draft.tokens[0] in {text[i] for i in places}


@pytest.mark.parametrize("words", [1, 2, 3, 8])
def test_the_first_of_the_longest_matches_is_followed(words: int) -> None:
    rng = random.Random(words)
    for _ in range(100):
        text = [rng.randrange(words) for _ in range(rng.randrange(4, 90))]
        most = [min(place, 32) for place in range(len(text))]
        lengths = [
            next((n for n in range(most[i]) if text[i - 1 - n] != text[-1 - n]), most[i]) for i in range(len(text))
        ]
        [draft] = Lookup(2).draft([sequence(text)], [1])
        longest = max(lengths)
        assert draft.tokens == ([text[lengths.index(longest)]] if longest >= 2 else [])
        assert longest < 2 or draft.classes == classes_of_match(longest, 1)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=4))
def test_the_automaton_knows_every_end_that_was_followed(texts: list[list[int]]) -> None:
    automaton, ends = Automaton(), []
    for text in texts:
        state = automaton.root("")
        for token in text:
            state = automaton.extend(state, token)
        ends.append(state)
    for text, state in zip(texts, ends, strict=True):
        followed = [
            length
            for length in range(1, len(text) + 1)
            if any(text[-length:] == other[i : i + length] for other in texts for i in range(len(other) - length))
        ]
        match = automaton.match(state, len(text), 1, 1)
        assert match.length == max(followed, default=0)
        if followed:
            found = [*text[-match.length :], *match.draft]
            assert any(found == other[i : i + len(found)] for other in texts for i in range(len(other)))
    assert automaton.tokens == sum(map(len, texts))


def test_earlier_answers_are_proposed_to_those_of_the_same_salt() -> None:
    answers = Answers(2, 1000)
    for salt in ("a", "a", "b"):
        earlier = sequence([1], salt=salt)
        earlier.tokens += WORDS if salt == "a" else WORDS[::-1]
        answers.draft([earlier], [1])
        answers.forget(earlier)
    for salt, expected in (("a", WORDS[12:16]), ("b", [108, 107, 106, 105]), ("c", [])):
        one = sequence([1], salt=salt)
        one.tokens += WORDS[10:12] if salt != "b" else [110, 109]
        assert answers.draft([one], [4])[0].tokens == expected


def test_answers_propose_the_most_frequent_continuation() -> None:
    answers = Answers(2, 1000)
    for last in (7, 8, 8, 9):
        earlier = sequence([1])
        earlier.tokens += [50, 51, last]
        answers.forget(earlier) if answers.draft([earlier], [1]) else None
    one = sequence([1])
    one.tokens += [50, 51]
    assert answers.draft([one], [3])[0].tokens == [8]


def test_an_answer_that_is_behind_is_looked_for_by_its_end_and_added_little_by_little() -> None:
    answers = Answers(2, 1000)
    earlier, late, stranger = (sequence([1], name=n, salt=n[:1]) for n in ("earlier", "e-late", "stranger"))
    earlier.tokens += WORDS
    while answers.tokens < len(WORDS):
        answers.draft([earlier], [1])
    late.tokens += [*range(500, 600), *WORDS[10:20]]
    stranger.tokens += late.tokens[1:]
    assert answers.draft([late], [4])[0].tokens == WORDS[20:24]
    assert answers.tokens == len(WORDS) + 32
    assert answers.draft([stranger], [4]) == [NOTHING]
    assert answers.tokens == len(WORDS) + 64
    late.tokens += WORDS[20:24]
    for _ in range(3):
        assert answers.draft([late], [4])[0].tokens == WORDS[24:28]
    assert answers.tokens == len(WORDS) + 114 + 32
    third = sequence([1], name="third", salt="e")
    third.tokens += [508, 509]
    assert answers.draft([third], [4])[0].tokens == [510, 511, 512, 513]


@pytest.mark.parametrize("others", [0, 8])
def test_other_answers_are_looked_at_where_the_text_itself_has_no_long_match(others: int) -> None:
    """Here it has one of 3 tokens and another answer one of 10; beside eight more sequences, the own one does."""
    answers = Answers(2, 1000, lambda: 0.0)
    earlier = sequence([1], name="earlier")
    earlier.tokens += WORDS
    answers.draft([earlier], [1])
    answers.forget(earlier)
    one = sequence([1, *WORDS[7:10], 50, 51], name="one")
    one.tokens += WORDS[:10]
    more = [sequence([1, 2, 3], name=str(i)) for i in range(others)]
    assert answers.draft([one, *more], [2] * (1 + others))[0].tokens == ([50, 51] if others else WORDS[10:12])
    answers.forget(one)
    assert answers.tokens == len(WORDS) + 10, "it is kept in any case"


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_the_rest_of_answers_is_added_while_that_takes_no_time(seconds: float) -> None:
    """Between two answers pass so many seconds, and to add 32 tokens takes 0.0005: six times are less than 0.4 % of
    30 seconds."""
    now = itertools.count(0.0, 0.0005)
    passed = 0.0
    answers = Answers(2, 10_000, lambda: next(now) + passed)
    for start in range(1000, 5000, 1000):
        one = sequence([1], name=str(start))
        one.tokens += range(start, start + 200)
        answers.draft([one], [1])
        answers.forget(one)
        passed += seconds
    assert answers.tokens == 4 * 200 if seconds else 200 + 3 * 32 < answers.tokens < 3 * 200


def test_answers_are_bounded_and_the_newer_half_is_kept() -> None:
    answers, rng = Answers(2, 400), random.Random(0)
    running = sequence([1], name="running")
    texts = [[rng.randrange(1000) for _ in range(50)] for _ in range(30)]
    for text in texts:
        for one, tokens in ((sequence([1]), text), (running, text[:5])):
            one.tokens += tokens
            answers.draft([one], [1])
            if one is not running:
                answers.forget(one)
        assert answers.tokens <= 400
    for text, known in ((texts[-1], True), (texts[-3], True), (texts[0], False)):
        one = sequence([1])
        one.tokens += text[10:13]
        assert (answers.draft([one], [4])[0].tokens == text[13:17]) == known
