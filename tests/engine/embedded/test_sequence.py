"""Statuses of sequences, and tokens that are taken several at a time."""

from typing import Any

import pytest
import torch

from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.types import GenerateRequest, SamplingParams
from tests.engine.embedded.test_scheduler import machine, make

EOS = (2,)


def sequence_of(**sampling: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    request = GenerateRequest(request_id="a", prompt_token_ids=(5, 6, 7), sampling=params)
    state = SamplerState(params, (5, 6, 7), EOS, 0, None, 64, torch.device("cpu"))
    return Sequence(request=request, sampler=state, rank=0.0, arrival=0.0, tokens=[5, 6, 7])


@pytest.mark.parametrize(
    ("sampling", "sampled", "taken", "finish", "stop"),
    [
        pytest.param({}, (9,), 1, None, None, id="one"),
        pytest.param({}, (9, 10, 11), 3, None, None, id="several"),
        pytest.param({}, (9, 2, 11), 2, "stop", None, id="end of sequence in the middle"),
        pytest.param({"ignore_eos": True}, (9, 2, 11), 3, None, None, id="end of sequence that is ignored"),
        pytest.param({"stop_token_ids": (11,)}, (9, 11, 12), 2, "stop", 11, id="stop token"),
        pytest.param({"min_tokens": 2, "stop_token_ids": (9,)}, (9, 9, 9), 3, "stop", 9, id="stop token too early"),
        pytest.param({"max_tokens": 2}, (9, 10, 11), 2, "length", None, id="most tokens"),
        pytest.param({"max_tokens": 0}, (9,), 0, "length", None, id="none wanted"),
        pytest.param({}, tuple(range(10, 20)), 7, "length", None, id="end of the context"),
    ],
)
def test_tokens_are_taken_up_to_the_one_that_ends_the_output(
    sampling: dict[str, Any], sampled: tuple[int, ...], taken: int, finish: str | None, stop: int | None
) -> None:
    sequence = sequence_of(**sampling)
    assert sequence.take(sampled, EOS, context_length=10) == (taken, finish, stop)
    assert sequence.tokens == [5, 6, 7, *sampled[:taken]] and sequence.num_output == taken
    assert sequence.sampler.position == taken


def test_a_sequence_goes_through_its_statuses() -> None:
    runner = machine(blocks=8, seqs=2, reuse=False)
    first, second = make("first", [1] * 8, 20, arrival=0.0), make("second", [2] * 8, 20, arrival=1.0)
    for sequence in (first, second):
        runner.scheduler.add(sequence)
    assert [sequence.status for sequence in (first, second)] == [SequenceStatus.WAITING] * 2
    runner.step()
    assert [sequence.status for sequence in (first, second)] == [SequenceStatus.RUNNING] * 2
    admission = second.admission
    while runner.scheduler.preemptions == 0:
        runner.step()
    assert (first.status, second.status, second.slot) == (SequenceStatus.RUNNING, SequenceStatus.WAITING, -1)
    runner.run()
    assert [sequence.status for sequence in (first, second)] == [SequenceStatus.FINISHED] * 2
    assert second.admission > admission


def test_operations_that_the_status_forbids_raise_assertion_errors() -> None:
    runner = machine()
    sequence = make("a", [1] * 8, 2)
    with pytest.raises(AssertionError):
        runner.scheduler.hold(sequence)
    runner.scheduler.add(sequence)
    with pytest.raises(AssertionError):
        runner.scheduler.abandon(sequence, again=True)
    runner.run()
    with pytest.raises(AssertionError, match="taken out before"):
        runner.scheduler.remove(sequence)
    with pytest.raises(AssertionError):
        runner.scheduler.add(sequence)
