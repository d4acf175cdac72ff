"""Handoffs that fail: transfers break, hang or come late, requests are aborted at every stage, handoffs have wrong
contents, and blocks run out.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine.embedded.handoff.state import HeldState
from engine.errors import EngineUnavailable, InvalidRequest
from engine.transfer.base import LeaseWord, TransferError
from engine.types import Delta, Handoff
from tests.engine.embedded.handoff.test_two_cores import SMALL, alone, prompt_of
from tests.support.handoff import Controlled, Pair, pair_of, request_of, said, sequence_of, step, tokens

PROMPT = prompt_of(50)
REQUEST = request_of("a", PROMPT)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[int]:
    return tokens(alone(tiny_model, [REQUEST])["a"])


@pytest.fixture(params=["off", "on"])
def pair(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Pair]:
    """Its transfers wait for the test."""
    with pair_of(tiny_model, {**SMALL, "overlap_scheduler": request.param, "transfer_timeout_seconds": 0.05}) as pair:
        pair.control()
        yield pair


def fetching(pair: Pair) -> tuple[Handoff, Controlled]:
    """REQUEST, while its blocks are being read."""
    handed = pair.begin(REQUEST)
    step(pair.decode)
    stats = pair.decode.stats()
    assert (stats.num_fetching_requests, stats.num_active_requests, stats.kv_cache_stats.used_num_blocks) == (1, 1, 7)
    assert not pair.decode.ready and pair.decode.poll_seconds is not None
    return handed, pair.controlled[-1]


def test_a_broken_transfer_has_the_prompt_computed_here(pair: Pair, expected: list[int]) -> None:
    handed, transfer = fetching(pair)
    transfer.scribble()
    transfer.error = "the peer died"
    assert said(handed, pair.finish()["a"]) == expected
    assert pair.transfers == (0, 1)


def test_a_transfer_that_cannot_begin_has_the_prompt_computed_here(
    pair: Pair, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise TransferError("no offer works")

    assert pair.decode.remote is not None
    monkeypatch.setattr(pair.decode.remote.transfers, "read", refuse)
    handed = pair.begin(REQUEST)
    assert said(handed, pair.finish()["a"]) == expected
    assert pair.transfers == (0, 1)


def test_a_late_transfer_is_given_up_and_its_blocks_wait_for_its_end(pair: Pair, expected: list[int]) -> None:
    handed, transfer = fetching(pair)
    time.sleep(0.06)
    assert pair.decode.poll() and transfer.cancelled and pair.decode.ready
    deltas: list[Delta] = []
    while pair.decode.scheduler.running or pair.decode.scheduler.waiting:
        deltas += [delta for _, delta in step(pair.decode)]
        transfer.scribble()
    assert said(handed, deltas) == expected
    assert pair.decode.stats().kv_cache_stats.used_num_blocks == 7 and pair.decode.busy, "the orphans"
    transfer.ended = True
    pair.finish()
    assert pair.transfers == (0, 1)


def test_the_end_of_a_transfer_that_was_given_up_may_be_an_error(pair: Pair) -> None:
    _, transfer = fetching(pair)
    pair.decode.abort("a")
    assert pair.decode.stats().kv_cache_stats.used_num_blocks == 7 and transfer.cancelled
    transfer.error = "cancelled"
    pair.finish()
    assert pair.transfers == (0, 0) and pair.decode.stats().num_aborted_requests == 1


def test_blocks_of_a_broken_transfer_are_not_reused(pair: Pair, expected: list[int]) -> None:
    _, transfer = fetching(pair)
    transfer.scribble()
    pair.decode.abort("a")
    transfer.ended = True
    assert pair.decode.poll()
    again = replace(REQUEST, request_id="b")
    pair.decode.add(sequence_of(pair.decode, again))
    assert tokens(pair.finish()["b"]) == expected


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("aborted", [False, True])
def test_blocks_read_after_the_lease_ended_are_discarded(
    tiny_model: Path, expected: list[int], overlap: str, aborted: bool
) -> None:
    options = {**SMALL, "overlap_scheduler": overlap}
    with pair_of(tiny_model, {**options, "num_blocks": 8}, options) as pair:
        pair.control()
        handed, transfer = fetching(pair)
        pair.prefill.abort("a")
        other = pair.hand_over(request_of("other", prompt_of(60)))
        transfer.succeed()
        assert pair.decode.poll(), "before anybody here knows of the lease's end"
        if aborted:
            pair.decode.abort("a")
        rest = pair.finish().get("a", [])
        pair.decode.add(sequence_of(pair.decode, replace(REQUEST, request_id="b")))
        assert tokens(pair.finish()["b"]) == expected
        assert pair.transfers == (0, 1) and other.state and (aborted or said(handed, rest) == expected)


def _queued_for_prefill(pair: Pair) -> None:
    pair.prefill.add(sequence_of(pair.prefill, replace(REQUEST, prefill_only=True)))
    pair.prefill.abort("a")


def _prefilling(pair: Pair) -> None:
    pair.prefill.add(sequence_of(pair.prefill, replace(REQUEST, prefill_only=True)))
    step(pair.prefill)  # launched with overlap, else held
    pair.prefill.abort("a")
    assert step(pair.prefill) == []


def _held(pair: Pair) -> None:
    pair.hand_over(REQUEST)
    pair.prefill.abort("a")


def _queued_for_decode(pair: Pair) -> None:
    pair.begin(REQUEST)
    pair.decode.abort("a")


def _decoding(pair: Pair) -> None:
    _, transfer = fetching(pair)
    transfer.succeed()
    assert len(step(pair.decode)) + len(step(pair.decode)) in (1, 2)
    pair.decode.abort("a")


@pytest.mark.parametrize("abort", [_queued_for_prefill, _prefilling, _held, _queued_for_decode, _decoding])
def test_an_abort_frees_everything_at_every_stage(pair: Pair, abort: Callable[[Pair], None]) -> None:
    abort(pair)
    pair.finish()
    pair.check_clean()


def test_sequences_wait_for_a_shared_prefix_only_while_it_is_being_read(pair: Pair, expected: list[int]) -> None:
    _, transfer = fetching(pair)
    pair.decode.add(sequence_of(pair.decode, replace(REQUEST, request_id="b")))
    assert step(pair.decode) == [] and not pair.decode.ready
    pair.decode.abort("a")
    transfer.ended = True
    assert tokens(pair.finish()["b"]) == expected


def test_a_fetching_sequence_is_no_victim(tiny_model: Path) -> None:
    with pair_of(tiny_model, SMALL, {**SMALL, "num_blocks": 16, "transfer_timeout_seconds": 60.0}) as pair:
        pair.control()
        old = request_of("old", prompt_of(30), max_tokens=90)
        handed = pair.begin(REQUEST)
        step(pair.decode)
        pair.decode.add(sequence_of(pair.decode, old))
        deltas = []
        while len(deltas) < 20 or pair.decode.ready:
            deltas += step(pair.decode)
        assert pair.decode.scheduler.fetching and pair.decode.scheduler.waiting, "the other one gave way and waits"
        assert pair.decode.stats().num_preemptions == 1
        pair.controlled[0].succeed()
        rest = pair.finish()
        assert said(handed, rest["a"]) == tokens(alone(tiny_model, [REQUEST])["a"])
        assert tokens([delta for _, delta in deltas] + rest["old"]) == tokens(alone(tiny_model, [old])["old"])


def test_sequences_wait_for_held_blocks_without_busy_steps(tiny_model: Path) -> None:
    with pair_of(tiny_model, {**SMALL, "num_blocks": 10}) as pair:
        pair.hand_over(REQUEST)
        other = replace(request_of("b", prompt_of(40)), prefill_only=True)
        pair.prefill.add(sequence_of(pair.prefill, other))
        assert pair.prefill.ready and step(pair.prefill) == [] and not pair.prefill.ready
        pair.prefill.abort("a")
        assert pair.prefill.ready
        while not (outputs := step(pair.prefill)):
            pass
        assert outputs[0][1].held is not None
        pair.prefill.abort("b")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"kv_block_size": 16},
            r"block size 16 here, 8 on the prefill replica; bytes of a block \(12288,\) here, \(6144,\) on",
        ),
        ({"dtype": "bfloat16"}, "KV cache type bfloat16 here, float32 on the prefill replica"),
    ],
)
def test_other_layouts_are_refused_by_both_values(tiny_model: Path, options: dict[str, Any], said: str) -> None:
    with pair_of(tiny_model, SMALL, {**SMALL, **options}) as pair:
        with pytest.raises(EngineUnavailable, match=said):
            pair.begin(REQUEST)
        pair.finish()


def test_the_same_architecture_with_other_weights_is_another_model(tiny_model: Path, tmp_path: Path) -> None:
    tuned = shutil.copytree(tiny_model, tmp_path / "tuned")
    weights = tuned / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    with pair_of(tiny_model, SMALL, {**SMALL, "model": str(tuned)}) as pair:
        with pytest.raises(EngineUnavailable, match=r"model [0-9a-f]{16} here, [0-9a-f]{16} on the prefill replica"):
            pair.begin(REQUEST)
        pair.finish()


def _state(handed: Handoff, **changes: Any) -> Handoff:
    state = msgspec.msgpack.decode(handed.state, type=HeldState)
    return replace(handed, state=msgspec.msgpack.encode(replace(state, **changes)))


LIES: dict[str, Callable[[Handoff], Handoff]] = {
    "of engine fake": lambda handed: replace(handed, backend="fake"),
    "another prompt": lambda handed: replace(handed, prompt_token_ids=(5, 6)),
    "must have one token": lambda handed: replace(handed, first=replace(handed.first, finish_reason="stop")),
    "must have one token, and": lambda handed: replace(handed, first=replace(handed.first, token_ids=(5, 6))),
    "must have a state": lambda handed: replace(handed, first=replace(handed.first, token_ids=()), state=b""),
    "and a number of": lambda handed: replace(handed, first=replace(handed.first, token_ids=()), computed=-1),
    "token id must be from 0 to 383": lambda handed: replace(handed, first=replace(handed.first, token_ids=(384,))),
    "state cannot be read": lambda handed: replace(handed, state=b"\xc1"),
    "state cannot be read: Expected": lambda handed: replace(handed, state=msgspec.msgpack.encode(["layout"])),
    "state has 8388609 bytes": lambda handed: replace(handed, state=bytes((8 << 20) + 1)),
    "tables for 1 groups": lambda handed: _state(handed, tables=((0,) * 7, (0,) * 7)),
    "has 6 blocks for a prompt of 7": lambda handed: _state(handed, tables=((0,) * 6,)),
}


@pytest.mark.parametrize("said", LIES)
def test_a_handoff_that_lies_is_refused(tiny_model: Path, said: str) -> None:
    with pair_of(tiny_model, SMALL) as pair:
        handed = LIES[said](pair.hand_over(REQUEST))
        with pytest.raises(InvalidRequest, match=said) as caught:
            sequence_of(pair.decode, replace(REQUEST, handoff=handed))
        assert caught.value.param == "handoff"
        pair.finish()


@pytest.mark.parametrize(
    "beyond",
    [{"tables": ((block,) * 7,)} for block in (-1, 300, 1 << 39, 1 << 62)] + [{"lease": LeaseWord(1 << 40, 1)}],
)
def test_addresses_beyond_the_peers_memory_are_not_read(
    tiny_model: Path, expected: list[int], beyond: dict[str, Any]
) -> None:
    with pair_of(tiny_model, SMALL) as pair:
        handed = _state(pair.hand_over(REQUEST), **beyond)
        pair.decode.add(sequence_of(pair.decode, replace(REQUEST, handoff=handed)))
        assert said(handed, pair.finish()["a"]) == expected
        assert pair.transfers == (0, 1)
