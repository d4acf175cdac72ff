"""Items of answers: any split of a model's parts gives the same items, and their events add up to the items."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import FinishReason, Logprob
from multimodal.answers.choices import Piece
from multimodal.answers.items import Added, Closed, Ended, Happening, Opened, Reducer
from multimodal.answers.parts import Part, Reasoning, Text, ToolCall

WORDS = st.text(max_size=12)
RUNS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), WORDS),
        st.tuples(st.just("reasoning"), WORDS),
        st.tuples(st.just("call"), st.sampled_from(["{}", '{"a": [1, "b"]}', '{"a": ', ""])),
    ),
    max_size=8,
)


def choice() -> Any:
    return SimpleNamespace(prompt_tokens=5, cached_tokens=4, completion_tokens=3, reasoning_tokens=2)


def piece(parts: Sequence[Part], finish: FinishReason | None = None, logprobs: Sequence[Any] = ()) -> Piece:
    return Piece(0, list(parts), (), logprobs, finish, None, None)


def parts_of(runs: Sequence[tuple[str, str]], cuts: Sequence[int]) -> list[Part]:
    """The parts of runs, the text of each cut at `cuts`."""
    found: list[Part] = []
    calls = -1
    for kind, text in runs:
        marks = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
        for number, (begin, end) in enumerate(pairwise(marks)):
            if kind == "call":
                calls += number == 0
                first = {"id": f"call-{calls}", "name": f"tool-{calls}"} if number == 0 else {}
                found.append(ToolCall(calls, arguments=text[begin:end], **first))
            else:
                found.append(Text(text[begin:end]) if kind == "text" else Reasoning(text[begin:end]))
    return found


def happenings(parts: Sequence[Part], size: int, finish: FinishReason) -> tuple[Reducer, list[Happening]]:
    """Reduce `parts`, so many of them in a piece."""
    reducer = Reducer(choice(), "id-")
    found = [
        event for start in range(0, len(parts), size) for event in reducer.feed(piece(parts[start : start + size]))
    ]
    return reducer, found + reducer.feed(piece([], finish))


@settings(max_examples=50)
@given(RUNS, st.lists(st.integers(0, 20), max_size=4), st.integers(1, 5), st.sampled_from(["stop", "length"]))
def test_any_split_gives_the_same_items(
    runs: list[tuple[str, str]], cuts: list[int], size: int, finish: FinishReason
) -> None:
    whole, _ = happenings(parts_of(runs, []), 1000, finish)
    split, _ = happenings(parts_of(runs, cuts), size, finish)

    def comparable(reducer: Reducer) -> list[Any]:
        return [
            (item.place, item.id, item.kind, item.text, item.call_id, item.name, item.closed, item.complete)
            for item in reducer.items
        ]

    assert comparable(split) == comparable(whole)
    joined = [text for _, text in runs if text]
    assert "".join(item.text for item in split.items) == "".join(joined)


@settings(max_examples=50)
@given(RUNS, st.lists(st.integers(0, 20), max_size=4), st.integers(1, 5))
def test_events_add_up_to_the_items(runs: list[tuple[str, str]], cuts: list[int], size: int) -> None:
    reducer, found = happenings(parts_of(runs, cuts), size, "stop")
    assert isinstance(found.pop(), Ended)
    texts: list[str] = []
    opened = closed = 0
    for event in found:
        match event:
            case Opened():
                assert opened == closed, "only one item is open"
                assert event.item is reducer.items[opened]
                opened += 1
                texts.append("")
            case Added():
                assert event.text
                texts[-1] += event.text
            case Closed():
                closed += 1
                assert event.item.text == texts[-1]
    assert opened == closed == len(reducer.items)


def test_items_have_ids_of_their_own_and_a_call_its_name() -> None:
    parts: list[Part] = [
        Reasoning("Hm."),
        Text("Let me "),
        Text("see."),
        ToolCall(0, "call-1", "find", "{"),
        ToolCall(0, arguments="}"),
        Text("Done."),
    ]
    reducer, found = happenings(parts, 1, "stop")
    assert [(item.id, item.kind, item.text) for item in reducer.items] == [
        ("id-0000", "reasoning", "Hm."),
        ("id-0001", "text", "Let me see."),
        ("id-0002", "call", "{}"),
        ("id-0003", "text", "Done."),
    ]
    assert (reducer.items[2].call_id, reducer.items[2].name) == ("call-1", "find")
    assert all(item.complete for item in reducer.items)
    end = found[-1]
    assert isinstance(end, Ended)
    assert (end.usage.prompt, end.usage.cached, end.usage.output, end.usage.reasoning) == (5, 4, 3, 2)


def test_items_that_break_off_are_incomplete() -> None:
    text, _ = happenings([Text("Once upon")], 1, "length")
    call, _ = happenings([ToolCall(0, "call-1", "find", '{"a": ')], 1, "stop")
    whole, _ = happenings([ToolCall(0, "call-1", "find", "{}")], 1, "length")
    assert [reducer.items[0].complete for reducer in (text, call, whole)] == [False, False, True]


def test_log_probabilities_wait_for_the_text_of_their_tokens() -> None:
    reducer = Reducer(choice(), "id-")
    entries = [(Logprob(token, -0.5, 1),) for token in range(4)]
    reducer.feed(piece([Reasoning("Hm.")], logprobs=entries[:1]))
    reducer.feed(piece([], logprobs=entries[1:2]))
    (_, _, added) = reducer.feed(piece([Text("é")], logprobs=entries[2:3]))
    reducer.feed(piece([Text("!")], logprobs=entries[3:]))
    assert isinstance(added, Added)
    assert added.logprobs == entries[1:3]
    assert reducer.items[-1].logprobs == entries[1:]
