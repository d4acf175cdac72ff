"""Handoffs while the prompt is being computed: what is read when, and what happens if either side gives up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine.embedded.handoff import leases
from engine.embedded.handoff.state import HeldState
from engine.embedded.models.runner import ModelRunner
from engine.embedded.sampling.sampler import Sampler
from engine.embedded.sampling.state import SamplerState
from engine.errors import EngineUnavailable
from engine.types import Delta, GenerateRequest, Handoff, is_early
from tests.engine.embedded.handoff.test_two_cores import SMALL, alone, prompt_of
from tests.support.handoff import Pair, pair_of, request_of, sequence_of, step, tokens, travelled

PROMPT = prompt_of(60)
REQUEST = request_of("a", PROMPT)
CHUNK = 16


@pytest.fixture(autouse=True)
def each_step_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "EARLY_TOKENS", 1)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[int]:
    return tokens(alone(tiny_model, [REQUEST])["a"])


@pytest.fixture
def pair(overlap: str, tiny_model: Path) -> Iterator[Pair]:
    """Its transfers wait for the test, and a prompt takes several steps."""
    common = {**SMALL, "overlap_scheduler": overlap, "max_num_tokens": CHUNK}
    with pair_of(tiny_model, common, {**common, "transfer_timeout_seconds": 60.0}) as pair:
        pair.control()
        yield pair


def start(pair: Pair) -> None:
    pair.prefill.add(sequence_of(pair.prefill, replace(REQUEST, prefill_only=True, early_handoff=True)))


def next_handoff(pair: Pair) -> Handoff:
    """Run the prefill core until it has something to say."""
    while not (outputs := step(pair.prefill)):
        pass
    [(name, delta)] = outputs
    assert name == "a"
    return travelled(delta)


def transfer(pair: Pair) -> None:
    """Have the transfers that have begun succeed, and the decode core take note."""
    for controlled in pair.controlled:
        if not controlled.ended:
            controlled.succeed()
    pair.decode.poll()


def decoded_here(pair: Pair, request: GenerateRequest) -> list[Delta]:
    """Return the deltas of the decode core if it computes the prompt itself."""
    pair.decode.add(sequence_of(pair.decode, request))
    deltas = []
    while pair.decode.ready:
        deltas += [delta for _, delta in step(pair.decode)]
    return deltas


def blocks_of(handed: Handoff) -> tuple[int, ...]:
    return msgspec.msgpack.decode(handed.state, type=HeldState).tables[0]


def read_by(pair: Pair) -> list[list[int]]:
    """The remote blocks of each transfer, without the word."""
    size = pair.decode.layout.block_bytes[0]
    return [[read.remote_offset // size for read in one.reads if read.region == 0] for one in pair.controlled]


def begin(pair: Pair, handoffs: int) -> list[Handoff]:
    """Take the first early handoffs, and read what they say can be read."""
    start(pair)
    taken = []
    for _ in range(handoffs):
        taken.append(next_handoff(pair))
        pair.take(REQUEST, taken[-1])
        if len(taken) == 1:
            assert step(pair.decode) == [] and not pair.decode.ready, "it waits for more, without busy steps"
        transfer(pair)
    assert all(handed.early for handed in taken)
    return taken


def test_blocks_are_read_as_steps_that_computed_them_end(pair: Pair, overlap: str, expected: list[int]) -> None:
    start(pair)
    handoffs: list[Handoff] = []
    steps = 0
    while not handoffs or handoffs[-1].early:
        steps += 1
        for _, delta in step(pair.prefill):
            handoffs.append(travelled(delta))
            if handoffs[-1].early:
                ended = steps - 1 if overlap == "on" else steps
                assert handoffs[-1].computed == min(CHUNK * ended, len(PROMPT))
            pair.take(REQUEST, handoffs[-1])
            step(pair.decode)
            blocks, seen = blocks_of(handoffs[-1]), [block for one in read_by(pair) for block in one]
            whole = len(blocks) if not handoffs[-1].early else handoffs[-1].computed // 8
            assert seen == list(blocks[:whole]), "each once, and none that is not computed"
            transfer(pair)
    assert [len(one) for one in read_by(pair)] == [2, 2, 2, 2]
    assert [any(read.region == 1 for read in one.reads) for one in pair.controlled] == [False, False, False, True]
    assert len({handed.state for handed in handoffs}) == 1
    stats = pair.decode.stats()
    assert (stats.kv_transfer_success_total, stats.kv_transfer_bytes) == (1, 8 * pair.decode.layout.block_bytes[0])
    assert [*handoffs[-1].first.token_ids, *tokens(pair.finish()["a"])] == expected


def test_the_end_is_read_once_what_came_before_has_been(pair: Pair, expected: list[int]) -> None:
    handoffs = begin(pair, 2)
    while handoffs[-1].early:
        handoffs.append(next_handoff(pair))
        pair.take(REQUEST, handoffs[-1])
    assert not pair.controlled[-1].ended and sum(map(len, read_by(pair))) < 8 and not pair.decode.ready
    transfer(pair)
    transfer(pair)
    assert [*handoffs[-1].first.token_ids, *tokens(pair.finish()["a"])] == expected
    assert sum(map(len, read_by(pair))) == 8


def test_all_is_prepared_while_the_first_blocks_are_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []

    def expect(runner: ModelRunner, slot: int, admission: int, tables: list[list[int]]) -> None:
        noted.append(f"expected in {slot}")

    def enter(sampler: Sampler, slots: list[int], admissions: list[int], states: list[SamplerState]) -> None:
        noted.append(f"entered {slots} after {[len(state.tokens) - state.num_prompt for state in states]}")

    monkeypatch.setattr(type(pair.decode.runner), "expect", expect)
    monkeypatch.setattr(Sampler, "enter", enter)
    handed = begin(pair, 1)[-1]
    assert noted[-2:] == ["expected in 0", "entered [0] after [0]"]
    while handed.early:
        handed = next_handoff(pair)
        pair.take(REQUEST, handed)
        transfer(pair)
    pair.finish()


@pytest.mark.parametrize("handoffs", [1, 2, 3])
@pytest.mark.parametrize("reading", [False, True])
def test_either_side_may_give_up_in_the_midst(pair: Pair, handoffs: int, reading: bool) -> None:
    begin(pair, handoffs)
    if reading:
        pair.take(REQUEST, next_handoff(pair))
    pair.prefill.abort("a")
    pair.decode.abort("a")
    for controlled in pair.controlled:
        assert controlled.ended or controlled.cancelled
        controlled.ended = True
    pair.decode.poll()
    while pair.prefill.busy:
        assert step(pair.prefill) == []
    pair.check_clean()


@pytest.mark.parametrize("handoffs", [1, 2, 3])
def test_blocks_that_were_given_up_in_the_midst_are_not_used(pair: Pair, expected: list[int], handoffs: int) -> None:
    """The lease word is gone, even if a handoff with the first token still comes."""
    early = begin(pair, handoffs)[-1]
    pair.prefill.abort("a")
    while pair.prefill.busy:
        step(pair.prefill)
    pair.decode.continue_handoff("a", replace(early, first=Delta((expected[0],))))
    transfer(pair)
    assert pair.decode.stats().kv_transfer_failure_total == 1
    assert [expected[0], *tokens(pair.finish()["a"])] == expected


def test_without_the_first_token_a_failed_transfer_ends_the_request(pair: Pair, expected: list[int]) -> None:
    begin(pair, 2)
    pair.take(REQUEST, next_handoff(pair))
    pair.controlled[-1].scribble()
    pair.controlled[-1].error = "the peer died"
    assert pair.decode.poll() and pair.decode.ready
    [(name, error)] = pair.decode.step()
    assert name == "a" and type(error) is EngineUnavailable and "the peer died" in str(error)
    assert pair.decode.stats().kv_cache_stats.used_num_blocks == 0 and not pair.decode.busy
    pair.early.clear()  # so that it begins again from the last one
    while (handed := next_handoff(pair)).early:
        pass
    pair.take(REQUEST, handed)
    step(pair.decode)
    transfer(pair)
    assert [*handed.first.token_ids, *tokens(pair.finish()["a"])] == expected


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_request_that_cannot_be_read_may_be_aborted_or_continued(pair: Pair, goes_on: bool) -> None:
    """Commands that were queued before anyone has been told."""
    begin(pair, 2)
    following = next_handoff(pair)
    pair.take(REQUEST, following)
    pair.controlled[-1].error = "the peer died"
    assert pair.decode.poll()
    if goes_on:
        pair.decode.continue_handoff("a", following)
        [(name, error)] = pair.decode.step()
        assert name == "a" and type(error) is EngineUnavailable
    else:
        pair.decode.abort("a")
        assert not pair.decode.step()
    assert pair.decode.stats().kv_cache_stats.used_num_blocks == 0 and not pair.decode.busy
    pair.prefill.abort("a")
    while pair.prefill.busy:
        step(pair.prefill)


def test_a_later_handoff_of_other_blocks_is_refused(pair: Pair) -> None:
    early = begin(pair, 2)[-1]
    with pytest.raises(EngineUnavailable, match="given up the KV blocks"):
        pair.decode.continue_handoff("a", replace(early, state=b"others"))
    pair.decode.poll()
    assert pair.decode.stats().kv_cache_stats.used_num_blocks == 0
    pair.prefill.abort("a")
    while pair.prefill.busy:
        step(pair.prefill)


def test_a_preempted_prompt_takes_its_early_handoffs_back(tiny_model: Path, expected: list[int], overlap: str) -> None:
    """An older request needs its blocks, and writes to them."""
    old = request_of("old", prompt_of(30), max_tokens=60)
    options: dict[str, Any] = {**SMALL, "overlap_scheduler": overlap}
    with pair_of(tiny_model, {**options, "max_num_tokens": 4, "num_blocks": 13}, options) as pair:
        pair.prefill.add(sequence_of(pair.prefill, old))
        deltas = step(pair.prefill)
        while not deltas:
            deltas = step(pair.prefill)
        start(pair)
        outputs = []
        while pair.prefill.scheduler.running or pair.prefill.scheduler.waiting or pair.prefill.ready:
            for name, delta in step(pair.prefill):
                deltas.append((name, delta))
                if name == "a":
                    outputs.append(delta)
                    pair.take(REQUEST, travelled(delta))
            if pair.decode.ready and not any(not is_early(delta) for delta in outputs):
                assert step(pair.decode) == []
            pair.decode.poll()
        assert pair.prefill.stats().num_preemptions > 0
        held = [delta.held for delta in outputs if delta.held is not None]
        taken_back = [index for index, each in enumerate(held) if not each.state]
        assert taken_back and held[taken_back[0] - 1].computed > 0, "in the midst"
        assert len({each.state for each in held if each.state}) > 1, "it was announced anew, with a lease of its own"
        rest = pair.finish()
        assert [*outputs[-1].token_ids, *tokens(rest["a"])] == expected
        assert tokens([delta for name, delta in deltas if name == "old"]) == tokens(alone(tiny_model, [old])["old"])
        assert pair.decode.stats().kv_transfer_failure_total == 0


def test_nobody_waits_for_what_another_replica_has_yet_to_compute(pair: Pair, expected: list[int]) -> None:
    begin(pair, 2)
    assert tokens(decoded_here(pair, replace(REQUEST, request_id="same"))) == expected
    pair.prefill.abort("a")
    pair.decode.abort("a")
    pair.decode.poll()
    while pair.prefill.busy:
        step(pair.prefill)


def test_without_room_it_holds_nobody_up(tiny_model: Path, expected: list[int]) -> None:
    common = {**SMALL, "max_num_tokens": CHUNK}
    with pair_of(tiny_model, common, {**common, "num_blocks": 10}) as pair:
        first, second = (
            request_of("first", prompt_of(30), max_tokens=9),
            request_of("second", prompt_of(20), max_tokens=3),
        )
        pair.decode.add(sequence_of(pair.decode, first))
        step(pair.decode)
        start(pair)
        pair.take(REQUEST, next_handoff(pair))
        pair.decode.add(sequence_of(pair.decode, second))
        said: dict[str, list[Delta]] = {}
        while pair.decode.ready:
            for name, delta in step(pair.decode):
                said.setdefault(name, []).append(delta)
        assert tokens(said["second"]) == tokens(alone(tiny_model, [second])["second"])
        assert tokens(said["first"]) == tokens(alone(tiny_model, [first])["first"])
        while (handed := next_handoff(pair)).early:
            pair.take(REQUEST, handed)
        pair.take(REQUEST, handed)
        assert [*handed.first.token_ids, *tokens(pair.finish()["a"])] == expected


def test_what_is_here_is_not_read_and_not_run_before_the_first_token(pair: Pair, expected: list[int]) -> None:
    decoded_here(pair, replace(REQUEST, request_id="before"))
    handoffs = begin(pair, 1)
    while handoffs[-1].early:
        assert not pair.decode.ready
        handoffs.append(next_handoff(pair))
        pair.take(REQUEST, handoffs[-1])
        while pair.decode.ready and handoffs[-1].early:
            assert step(pair.decode) == []
        transfer(pair)
    assert sum(map(len, read_by(pair))) == 1, "the last block is not full, and so not reusable"
    assert [*handoffs[-1].first.token_ids, *tokens(pair.finish()["a"])] == expected


def test_a_prompt_that_is_all_here_waits_for_its_first_token(pair: Pair) -> None:
    request = request_of("a", prompt_of(64))
    whole = tokens(decoded_here(pair, replace(request, request_id="before")))
    pair.prefill.add(sequence_of(pair.prefill, replace(request, prefill_only=True, early_handoff=True)))
    while (handed := next_handoff(pair)).early:
        pair.take(request, handed)
        while pair.decode.ready:
            assert step(pair.decode) == [], "it does not sample the first token itself"
    pair.take(request, handed)
    assert [*handed.first.token_ids, *tokens(pair.finish()["a"])] == whole and not pair.controlled


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"max_tokens": 0, "prompt_logprobs": 1}])
def test_what_is_not_handed_over_is_not_announced(pair: Pair, sampling: dict[str, Any]) -> None:
    request = request_of("a", PROMPT, **sampling)
    pair.prefill.add(sequence_of(pair.prefill, replace(request, prefill_only=True, early_handoff=True)))
    while pair.prefill.ready:
        assert not any(is_early(delta) for _, delta in step(pair.prefill))
    pair.prefill.abort("a")


def test_the_last_step_of_a_long_prompt_is_short(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.embedded.scheduler.LAST_CHUNK", 10)
    with pair_of(tiny_model, {**SMALL, "max_num_tokens": 64}) as pair:
        computed = {}
        for length in (10, 14, 60):
            request = replace(request_of("a", prompt_of(length)), prefill_only=True, early_handoff=True)
            pair.prefill.add(sequence_of(pair.prefill, request))
            deltas = []
            while pair.prefill.ready:
                deltas += [delta for _, delta in step(pair.prefill)]
            computed[length] = [delta.held.computed for delta in deltas if delta.held is not None and is_early(delta)]
            pair.prefill.abort("a")
        assert computed == {10: [], 14: [7], 60: [50]}
