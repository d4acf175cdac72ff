"""Rounds of drafts and verification that the host does not take part in: when they are planned, and what the engine
makes of their tokens. The CUDA runner's are tested in `models/cuda/test_cuda_head.py`."""

import random
from collections.abc import Sequence as Many
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.embedded.core import EngineCore
from engine.embedded.models.heads import MOST_ROUNDS, ROUND_DRAFTS, ROUND_TOKENS, HeadStep, RoundStart
from engine.embedded.models.native.head import NativeHead
from engine.embedded.sampling.sampler import Sampler
from engine.embedded.sequence import Sequence
from engine.embedded.speculation.costs import Costs, DecodeStep, Line
from engine.embedded.speculation.rounds import Rounds
from tests.engine.embedded.speculation.test_eagle import (  # noqa: F401 - fixtures
    PROMPTS,
    answers,
    config_of,
    drafted,
    folder,
    head,
    head_folder,
    one_thread,
    plain,
)
from tests.support.steps import Part, step_of

STEP = 0.0005
FAST = Costs(Line(STEP, 0.0), Line(STEP, 0.0))


class HostRounds:
    """`DraftRounds` that this test computes step by step: what it drafts is mostly what the model says."""

    most_sequences = 4
    core: EngineCore

    def __init__(self, expected: list[list[int]]) -> None:
        self._expected, self._rng = expected, random.Random(0)
        self._drafted: list[RoundStart] | None = None
        self._ran: list[int] = []
        self.runs: list[tuple[int, int, bool]] = []

    def goes_on(self, starts: Many[RoundStart]) -> bool:
        return list(starts) == self._drafted

    def run(self, starts: Many[RoundStart], step: HeadStep, rounds: int) -> torch.Tensor:
        goes_on = self.goes_on(starts)
        assert goes_on == (not step.tokens) and sum(step.lengths) == len(step.tokens)
        self.runs.append((len(starts), rounds, goes_on))
        running = {sequence.slot: sequence for sequence in self.core.scheduler.running}
        each = [self._computed(running[start.slot], start, rounds) for start in starts]
        self._drafted, self._ran = None, [start.admission for start in starts]
        return torch.tensor(each, dtype=torch.int32).transpose(0, 1)

    def note_taken(self, starts: Many[RoundStart]) -> None:
        if [start.admission for start in starts] == self._ran:
            self._drafted = list(starts)

    def _computed(self, sequence: Sequence, start: RoundStart, rounds: int) -> list[list[int]]:
        known, found = list(sequence.tokens), []
        assert (start.position, start.token) == (len(known) - 1, known[-1])
        whole = self._expected[int(sequence.request.request_id)]
        for _ in range(rounds):
            place = len(known) - sequence.num_prompt
            draft = (whole[place : place + ROUND_DRAFTS] + [0] * ROUND_DRAFTS)[:ROUND_DRAFTS]
            draft = [token if self._rng.random() < 0.8 else 5 for token in draft]
            tokens = [*known, *draft]
            part = Part(tokens, sequence.tables[0], len(known) - 1, ROUND_TOKENS, slot=start.slot, sampled=ROUND_TOKENS)
            drawn = self.core.runner.forward(step_of([part])).argmax(-1).tolist()
            right = next((i for i, token in enumerate(draft) if drawn[i] != token), ROUND_DRAFTS) + 1
            found.append([right, *drawn])
            known += drawn[:right]
        return found


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_rounds_change_nothing(
    folder: Path,  # noqa: F811
    head_folder: Path,  # noqa: F811
    plain: list[list[int]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    overlap: str,
) -> None:
    """Requests end in the middle of rounds, by their length and by a token that stops them."""
    rounds = HostRounds(plain)
    monkeypatch.setattr(NativeHead, "rounds", rounds)
    monkeypatch.setattr(Sampler, "draws_alone", lambda *_: True)
    asked = {"speculative": "eagle3", "speculative_model": str(head_folder), "speculative_min_speedup": 0.0}
    asked |= {"speculative_min_match": 1000, "speculative_tokens": ROUND_DRAFTS}
    rounds.core = EngineCore(config_of(folder, overlap_scheduler=overlap, **asked), lambda _: None)
    assert answers(rounds.core) == plain
    assert {goes_on for *_, goes_on in rounds.runs} == {True, False}
    assert max(count for _, count, _ in rounds.runs) == MOST_ROUNDS
    stats = rounds.core.stats().spec_decoding_stats
    tokens = sum(map(len, plain))
    assert stats is not None and tokens / 3 < stats.num_accepted_tokens < tokens
    first, *_, last = stats.accepted_per_position
    assert stats.num_drafts > first > last > 0 and sum(stats.accepted_per_position) == stats.num_accepted_tokens
    stop = plain[0][17]
    ended = answers(rounds.core, stop_token_ids=(stop,))
    assert ended[0] == plain[0][: plain[0].index(stop) + 1]
    assert {count for count, *_ in rounds.runs} >= {2, 3}, "the others go on"


class Ready:
    most_in_rounds = 4

    def __init__(self, ready_in: int = 0) -> None:
        self._ready_in = ready_in

    def ready_in(self, _: Many[Sequence]) -> int:
        return self._ready_in

    def run_rounds(self, sequences: Many[Sequence], rounds: int) -> torch.Tensor:
        raise NotImplementedError

    def end_rounds(self, sequences: Many[Sequence]) -> None:
        raise NotImplementedError


class Asked(SimpleNamespace):
    """A sequence, as far as a plan looks at it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def asked(count: int = 1, room: int = 100, length: int = 50) -> dict[Any, int]:
    return {Asked(tokens=[0] * length): room for _ in range(count)}


def step(tokens: float, seconds: float, rounds: int = 0) -> DecodeStep:
    return DecodeStep(1, 1 + 7 * (not rounds), int(tokens), True, seconds, seconds, rounds)


def test_as_many_rounds_as_there_is_room_and_time_for() -> None:
    rounds = Rounds(Ready())
    assert rounds.plan(asked(), FAST, 0.0) == MOST_ROUNDS
    assert rounds.plan(asked(room=ROUND_TOKENS * 3 - 1), FAST, 0.0) == 3
    assert rounds.plan(asked(room=ROUND_TOKENS - 1), FAST, 0.0) == 0, "one round is a step with a draft"
    assert rounds.plan(asked(4), FAST, 0.0) == MOST_ROUNDS
    assert rounds.wants(4, within=0) and not rounds.wants(5, within=None)
    assert rounds.plan(asked(4, length=20_000), FAST, 0.0) == 0
    slow = Costs(Line(0.01, 0.0), Line(0.01, 0.0))
    assert rounds.plan(asked(), slow, 0.0) == 0 and rounds.plan(asked(), None, 0.0) == MOST_ROUNDS
    assert rounds.plan(asked(), FAST, 5 / STEP) == 0, "earlier text promises more"


def test_rounds_begin_where_the_head_has_read_all() -> None:
    rounds = Rounds(Ready(ready_in=5))
    assert rounds.plan(asked(), FAST, 0.0) == 0
    assert not rounds.wants(1, within=4) and rounds.wants(1, within=5)
    rounds.count_steps(5)
    assert rounds.wants(1, within=0)


def test_rounds_rest_until_a_sequence_that_ends_soon_has_ended() -> None:
    rounds = Rounds(Ready())
    assert rounds.plan({**asked(3), **asked(room=ROUND_TOKENS)}, FAST, 0.0) == 0
    rounds.count_steps(ROUND_TOKENS)
    assert not rounds.wants(4, within=0)
    rounds.count_steps(1)
    assert rounds.wants(4, within=0)


def test_rounds_that_lose_time_pause() -> None:
    rounds = Rounds(Ready())
    for _ in range(20):
        rounds.note(step(20, 10 * STEP, 8), STEP, found=False)
    assert rounds.wants(1, within=0)
    for _ in range(3):
        rounds.note(step(8, 10 * STEP, 8), STEP, found=False)
    assert rounds.wants(1, within=0), "the others have saved more"
    for _ in range(60):
        rounds.note(step(8, 10 * STEP, 8), STEP, found=False)
    assert not rounds.wants(1, within=0) and rounds.wants(1, within=None)
    rounds.count_steps(1 << 20)
    assert rounds.wants(1, within=0)


def test_rounds_wait_while_earlier_text_brings_much_more() -> None:
    rounds = Rounds(Ready())
    rounds.note(step(24, 12 * STEP, 8), STEP, found=False)
    rounds.note(step(9, 2 * STEP), STEP, found=False)  # a draft of the head
    assert rounds.plan(asked(), FAST, 0.0) == MOST_ROUNDS
    rounds.note(step(9, 2 * STEP), STEP, found=True)
    assert rounds.plan(asked(), FAST, 0.0) == 0
    found = [rounds.plan(asked(), FAST, 0.0) for _ in range(20)]
    assert found[0] == 0 and found[-1] > 0, "nothing was found in a long time"
