"""The number of drafted tokens, which depends on acceptance and the times of steps."""

from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch

from engine.embedded.models.runner import StepInput
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.embedded.speculation.acceptance import Acceptance
from engine.embedded.speculation.asking import Asking
from engine.embedded.speculation.costs import TURN, Comparison, Costs, DecodeStep, Line, StepCosts
from engine.embedded.speculation.drafter import NOTHING, Draft
from engine.embedded.speculation.speculator import Speculator
from engine.types import GenerateRequest, SamplingParams


class Repeating:
    """Drafts that the test says are right or not: token 1 is what comes."""

    def __init__(self, *, free: bool = True, seconds: float = 0.0, length: int = 100) -> None:
        """`seconds`: time that a token takes; `length`: of the longest draft."""
        self.free = free
        self.right = True
        self.asked = 0
        self.last: list[Sequence] = []
        """Sequences that were drafted for last."""
        self.spent = 0.0
        self.seconds = seconds
        self.length = length

    def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
        self.asked += len(sequences)
        self.last = list(sequences)
        lengths = [min(limit, self.length) for limit in limits]
        self.spent += self.seconds * sum(lengths)
        kind = 2 if self.free else 7
        return [Draft([1 if self.right else 2] * length, [kind] * length) for length in lengths]

    def forget(self, sequence: Sequence) -> None:
        pass


def decoding(name: str, max_tokens: int = 100_000) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(
        request=GenerateRequest(request_id=name, prompt_token_ids=(5,), sampling=params),
        sampler=SamplerState(params, (5,), (2,), 0, None, 10, torch.device("cpu")),
        rank=0.0, arrival=0.0, tokens=[5, 1], computed=1, status=SequenceStatus.RUNNING,
    )  # fmt: skip


def simulate(
    speculator: Speculator, sequences: list[Sequence], steps: int, row: float, base: float = 1.0, search: float = 0.0
) -> tuple[float, int]:
    """Run steps in which every token is 1, and a row costs `row`; return tokens per second and drafted tokens. A step
    for which drafts are looked for takes `search` longer, as where the device waits for the host."""
    drafter = speculator.drafter
    assert isinstance(drafter, Repeating)
    seconds, tokens, drafted = -drafter.spent, 0, 0
    for _ in range(steps):
        before, asked, spent = tokens, drafter.asked, drafter.spent
        if speculator.next_step(len(sequences)):
            speculator.plan(sequences)
        rows = len(sequences) + sum(len(sequence.draft) for sequence in sequences)
        cost = base + row * rows + search * (drafter.asked > asked)
        for sequence in sequences:
            right = len(sequence.draft) if sequence.draft[:1] == [1] else 0
            drafted += len(sequence.draft)
            tokens += right + 1
            sequence.tokens += [1] * (right + 1)
            sequence.computed = len(sequence.tokens) - 1
        seconds += cost
        drafts = rows > len(sequences)  # without any, the plan is hidden behind the step before
        known, elapsed = cost + drafts * speculator.planning, cost + drafter.spent - spent
        if speculator.measures(len(sequences), waited=drafts):
            speculator.note_step(DecodeStep(len(sequences), rows, tokens - before, drafts, known, elapsed))
    return tokens / (seconds + drafter.spent), drafted


def speculator(drafter: Repeating, **options: Any) -> Speculator:
    fixed = {"most": 8, "min_speedup": 1.05, "context_length": 1 << 20, "clock": lambda: drafter.spent}
    return Speculator(drafter, **(fixed | options))


def test_right_drafts_are_used_in_full_where_rows_are_cheap() -> None:
    one = speculator(Repeating())
    simulate(one, sequences := [decoding("a")], 20, row=0.05)
    rate, drafted = simulate(one, sequences, 20, row=0.05)
    assert drafted == 20 * 8 and rate > 5


def test_wrong_drafts_are_given_up_and_taken_up_again() -> None:
    drafter = Repeating()
    drafter.right = False
    one, sequences = speculator(drafter), [decoding("a")]
    simulate(one, sequences, 50, row=0.1)
    rate, drafted = simulate(one, sequences, 200, row=0.1)
    assert drafted == 0 and rate > 0.97 / 1.1
    drafter.right = True
    simulate(one, sequences, 30, row=0.1)
    assert simulate(one, sequences, 20, row=0.1)[1] > 50, "what was not computed is judged, too"


def test_a_sequence_is_judged_by_itself() -> None:
    class Both(Repeating):
        def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
            return [
                Draft([1 if sequence.request.request_id == "good" else 2] * limit, [2] * limit)
                for sequence, limit in zip(sequences, limits, strict=True)
            ]

    one, good, bad = speculator(Both()), decoding("good"), decoding("bad")
    simulate(one, [good, bad], 60, row=0.1)
    one.plan([good, bad])
    assert len(good.draft) > 2 and not bad.draft


@pytest.mark.parametrize(("streams", "row", "least"), [(1, 1.0, 0.97), (64, 1.0, 0.97), (64, 0.02, 0.97)])
def test_load_turns_drafts_down(streams: int, row: float, least: float) -> None:
    """Where a row costs as much as a step, no draft is worth it; the plain speed is what is left."""
    drafter = Repeating()
    one, sequences = speculator(drafter), [decoding(str(index)) for index in range(streams)]
    simulate(one, sequences, 100, row=row)
    rate, _ = simulate(one, sequences, 100, row=row)
    assert rate > least * streams / (1.0 + row * streams)


def test_drafts_that_seem_too_dear_are_tried() -> None:
    """With 64 sequences a row costs far less here than the engine assumes until it has computed drafts for as many."""
    drafter = Repeating(length=0)
    one, sequences = speculator(drafter, min_speedup=1.1), [decoding(str(index)) for index in range(64)]
    simulate(one, sequences, 20, row=0.001)
    drafter.length = 8
    simulate(one, sequences, 10, row=0.001)
    assert simulate(one, sequences, 10, row=0.001)[1] == 10 * 64 * 8


@pytest.mark.parametrize("right", [True, False])
def test_trials_are_rare_where_they_fail(right: bool) -> None:
    """And nothing is looked up between them where no draft could be worth it."""
    drafter = Repeating()
    one, sequences = speculator(drafter), [decoding(str(index)) for index in range(64)]
    simulate(one, sequences, 200, row=1.0)
    drafter.right, drafter.asked = right, 0
    rate, drafted = simulate(one, sequences, 1000, row=1.0)
    assert rate > 0.985 * 64 / 65 and drafted < 300 and drafter.asked < 20 * 64


def test_a_trial_ends_where_its_step_cannot_be_measured() -> None:
    """As beside prompts, of which steps tell nothing about drafts."""
    drafter = Repeating(length=0)
    one, sequences = speculator(drafter, min_speedup=1.1), [decoding(str(index)) for index in range(64)]
    simulate(one, sequences, 100, row=0.001)
    drafter.length = 8
    assert [one.next_step(64) and one.plan(sequences) for _ in range(20)].count(True) == 1


@pytest.mark.parametrize(("length", "waits"), [(2, False), (8, True)])
def test_no_trial_is_waited_for_that_promises_only_the_token_under_way(length: int, waits: bool) -> None:
    drafter = Repeating(length=0)
    one, sequences = speculator(drafter, min_speedup=1.1), [decoding(str(index)) for index in range(64)]
    simulate(one, sequences, 100, row=0.001)
    drafter.length = 8
    simulate(one, [decoding("another")], 20, row=0.001)  # which finds them right
    drafter.length = length
    for sequence in sequences:
        sequence.pending, sequence.computed = 1, len(sequence.tokens)
    assert one.plan(sequences) == waits


def test_the_first_draft_of_a_model_may_take_long() -> None:
    """It loads what the next ones find."""
    drafter = Repeating(free=False, seconds=14.0)
    one, sequences = speculator(drafter), [decoding("a")]
    for _ in range(20):
        if not drafter.asked:
            simulate(one, sequences, 1, row=0.05)
    assert drafter.asked == 1
    drafter.seconds = 0.01
    simulate(one, sequences, 80, row=0.05)
    assert simulate(one, sequences, 20, row=0.05)[1] > 100


@pytest.mark.parametrize("streams", [1, 64])
def test_a_search_that_slows_every_step_down_is_left_off(streams: int) -> None:
    """However cheap rows seem: here every tenth step brings a few tokens more, and the search takes a sixth of each."""

    class Seldom(Repeating):
        def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
            drafts = super().draft(sequences, limits, least)
            return drafts if self.asked // len(sequences) % 10 == 0 or self.length == 8 else [NOTHING] * len(drafts)

    drafter = Seldom(length=1)
    one, sequences = speculator(drafter), [decoding(str(index)) for index in range(streams)]
    simulate(one, sequences, 100, row=0.001, search=0.17)
    rate, drafted = simulate(one, sequences, 3000, row=0.001, search=0.17)
    assert rate > 0.98 * streams / (1 + 0.001 * streams) and drafted < 100 * streams
    drafter.length = 8
    simulate(one, sequences, 1000, row=0.001, search=0.17)
    assert simulate(one, sequences, 500, row=0.001, search=0.17)[0] > 5 * rate, "it is tried again"


def test_a_few_sequences_are_tried_first_where_lookup_was_in_vain() -> None:
    drafter = Repeating(length=0)
    one, sequences = speculator(drafter), [decoding(str(index)) for index in range(64)]
    simulate(one, sequences, 20, row=0.001)
    tried: set[Sequence] = set()
    for _ in range(40):
        before = drafter.asked
        simulate(one, sequences, 1, row=0.001)
        assert drafter.asked - before in (0, 8)
        tried.update(drafter.last)
    assert len(tried) == 64, "others each time"
    drafter.length = 8
    simulate(one, sequences, 10, row=0.001)
    assert drafter.last == sequences


def test_the_others_are_not_looked_up_where_the_tried_ones_promise_too_little() -> None:
    drafter = Repeating()
    drafter.right = False
    one, sequences = speculator(drafter), [decoding(str(index)) for index in range(64)]
    simulate(one, sequences, 200, row=0.01)
    drafter.asked = 0
    simulate(one, sequences, 400, row=0.01)
    assert 20 * 8 <= drafter.asked < 400 * 9


def test_steps_that_nothing_is_looked_for_are_not_measured() -> None:
    """A step takes a tenth of a millisecond, a lookup half as long: there are hundreds of steps between two of them."""
    drafter = Repeating(length=0)
    one, sequences = speculator(drafter), [decoding(str(index)) for index in range(4)]
    simulate(one, sequences, 20, row=0.0, base=1e-4)
    measured = waited = 0
    for _ in range(500):
        if one.next_step(4):
            one.plan(sequences)
        measured += one.measures(4, waited=False)
        waited += one.measures(4, waited=True)
    assert waited > 300, "a step may have waited in vain"
    assert measured < 50 and drafter.asked < 50 * 4


def test_drafts_of_few_sequences_do_not_put_off_a_trial() -> None:
    """A model drafts for one of 64 sequences now and then, which does not show what a row costs."""
    lookup, model = Repeating(length=0), Repeating(free=False, seconds=0.01, length=1)
    model.right = False
    one, sequences = speculator(model, lookup=lookup, min_speedup=1.1), [decoding(str(index)) for index in range(64)]
    simulate(one, sequences, 1000, row=0.001)
    assert model.asked
    lookup.length = 8
    simulate(one, sequences, 40, row=0.001)
    assert simulate(one, sequences, 20, row=0.001)[1] > 19 * 64 * 8


class Reading(Repeating):
    """Reads hidden states."""

    def __init__(self) -> None:
        super().__init__(free=False, seconds=1e-3, length=1)
        self.right = False
        self.read_for = 0

    def read(self, step: StepInput, hidden: torch.Tensor) -> None:
        self.read_for += 1

    def skip(self) -> None:
        pass


@pytest.mark.parametrize(("streams", "always"), [(64, False), (4, True)])
def test_hidden_states_of_many_sequences_are_not_read_while_no_model_is_asked(streams: int, always: bool) -> None:
    drafter = Reading()
    one, sequences = speculator(drafter), [decoding(str(index)) for index in range(streams)]
    simulate(one, sequences, 200, row=1e-6, base=1e-3)
    numbers = list(range(streams))
    step = StepInput(numbers, numbers, numbers, [1] * streams, numbers, numbers, [], [1] * streams, numbers)
    drafter.read_for = 0
    for _ in range(100):
        simulate(one, sequences, 1, row=1e-6, base=1e-3)
        one.read(step, torch.empty(0))
    assert (drafter.read_for > 90) if always else (drafter.read_for < 50)


def test_a_slow_step_now_and_then_does_not_end_what_pays() -> None:
    """As when something else takes the processor. Two tokens take 7 seconds, one 4, and each fiftieth step 63."""
    one, sequences = speculator(Repeating(length=1)), [decoding("a")]
    simulate(one, sequences, 100, row=3.0)
    drafted = 0
    for _ in range(20):
        drafted += simulate(one, sequences, 49, row=3.0)[1] + simulate(one, sequences, 1, row=3.0, base=57.0)[1]
    assert drafted > 850


@pytest.mark.parametrize("few", [8, 16])
def test_plain_steps_of_few_sequences_are_not_what_many_are_compared_with(few: int) -> None:
    """Rows cost nothing here, and the search a third of a step."""
    drafter, sequences = Repeating(length=0), [decoding(str(index)) for index in range(2 * few - 1)]
    one = speculator(drafter)
    simulate(one, sequences[:few], 12, row=0.0, search=0.33)
    drafter.asked = 0
    simulate(one, sequences, 600, row=0.0, search=0.33)
    assert drafter.asked < 150 * len(sequences)


def test_model_time_beside_prompts_is_no_gain_of_the_steps_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Repeating(free=False, seconds=0.5, length=1)
    one, sequences = speculator(drafter), [decoding("a")]
    simulate(one, sequences, 100, row=0.05)
    asked = drafter.asked
    for _ in range(50):  # with prompts, so that nothing is noted
        if one.next_step(1):
            one.plan(sequences)
    assert drafter.asked > asked + 3
    noted: list[DecodeStep] = []
    monkeypatch.setattr(StepCosts, "note", lambda self, step: noted.append(step))
    simulate(one, sequences, 100, row=0.05)
    assert [step.elapsed for step in noted] == [pytest.approx(1 + 0.05 * step.rows) for step in noted] and noted


def test_a_draft_ends_where_the_answer_does() -> None:
    one = speculator(Repeating(), min_speedup=0)
    near, last = decoding("near", max_tokens=4), decoding("last", max_tokens=2)
    assert one.plan([near, last])
    assert (len(near.draft), last.draft) == (2, []), "the token after the draft is the last one"
    assert not speculator(Repeating(), min_speedup=0, context_length=3).plan([decoding("full")])


@pytest.mark.parametrize("before", [1, 500])
def test_choosing_drafts_counts_as_part_of_their_step(before: int) -> None:
    """However long drafts were worth it, it is known what a step takes without."""
    drafter = Repeating(length=0)
    one, sequences = speculator(drafter), [decoding("a")]
    simulate(one, sequences, 20, row=0.05)
    drafter.length = 4
    simulate(one, sequences, before, row=0.05)
    drafter.seconds = 2.0  # five tokens in 9.25 seconds, one in 1.05
    simulate(one, sequences, 200, row=0.05)
    assert simulate(one, sequences, 200, row=0.05)[1] < 40


def test_what_drafts_cost_many_sequences_they_do_not_cost_one() -> None:
    drafter = Repeating()
    one, sequences = speculator(drafter), [decoding("a")]
    assert simulate(one, [decoding(str(index)) for index in range(64)], 50, row=0.1, base=1000.0)[1] > 1000
    drafter.length = 0
    simulate(one, sequences, 300, row=0.05)
    drafter.length = 8
    assert simulate(one, sequences, 100, row=0.05)[1] > 500


def test_what_drafts_cost_once_is_forgotten() -> None:
    drafter = Repeating()
    one, sequences = speculator(drafter), [decoding("a")]
    simulate(one, sequences, 500, row=0.05)
    drafter.seconds = 2.0
    assert simulate(one, sequences, 100, row=0.05)[1] < 400, "a few dozen steps show it"
    drafter.seconds = 0.0
    assert simulate(one, sequences, 100, row=0.05)[1] < 100
    simulate(one, sequences, 10_000, row=0.05)
    assert simulate(one, sequences, 100, row=0.05)[1] > 500


def test_a_draft_that_ends_with_the_pending_token_is_not_worth_waiting_for_it() -> None:
    drafter = Repeating(length=1)
    one, sequence = speculator(drafter), decoding("a")
    simulate(one, [sequence], 20, row=0.05)
    assert simulate(one, [sequence], 20, row=0.05)[1] == 20
    sequence.pending = 1
    sequence.computed += 1
    assert one.next_step(1) and not one.plan([sequence])
    drafter.length = 2
    assert one.next_step(1) and one.plan([sequence])


def test_a_costly_drafter_is_used_only_where_it_pays_off() -> None:
    drafter = Repeating(free=False, seconds=0.05)
    drafter.right = False
    one, sequences = speculator(drafter), [decoding("a")]
    simulate(one, sequences, 60, row=0.2)
    drafter.asked = 0
    simulate(one, sequences, 640, row=0.2)
    assert 5 <= drafter.asked <= 40, "once in a while, to see"
    drafter.right = True
    simulate(one, sequences, 1000, row=0.2)
    assert simulate(one, sequences, 20, row=0.2)[1] > 20


@pytest.mark.parametrize(("right", "length", "least"), [(True, 2, 1.5), (True, 1, 1.2), (False, 3, 0.97)])
def test_a_model_that_does_not_pay_pauses(right: bool, length: int, least: float) -> None:
    """It takes a quarter of a step for a token, which is known only when it has drafted."""
    drafter = Repeating(free=False, seconds=0.25, length=length)
    drafter.right = right
    one, sequences = speculator(drafter), [decoding("a")]
    simulate(one, sequences, 60, row=0.1)
    assert simulate(one, sequences, 500, row=0.1)[0] > least / 1.1


def test_a_model_is_not_asked_where_earlier_text_promises_more() -> None:
    lookup, model = Repeating(), Repeating(free=False, seconds=0.1, length=2)
    one, sequences = speculator(model, lookup=lookup), [decoding("a")]
    simulate(one, sequences, 40, row=0.1)
    asked = model.asked
    assert simulate(one, sequences, 40, row=0.1)[1] > 40 * 6 and model.asked == asked
    lookup.right = False
    simulate(one, sequences, 60, row=0.1)
    asked = model.asked
    assert simulate(one, sequences, 40, row=0.1)[1] == 80 and model.asked == asked + 40


def test_a_draft_is_kept_until_tokens_have_come_to_judge_it_by() -> None:
    acceptance, sequence, draft = Acceptance(), decoding("a"), Draft([1], [2])
    acceptance.judge([sequence])
    before = next(acceptance.chances(sequence, draft))
    acceptance.note_found(sequence, draft)
    acceptance.judge([sequence])
    sequence.tokens.append(1)
    acceptance.judge([sequence])
    assert next(acceptance.chances(sequence, draft)) > before


def test_only_drafts_of_all_sequences_show_what_rows_cost() -> None:
    costs = StepCosts(read_before=40)
    for _ in range(12):
        costs.next()
        costs.note(DecodeStep(64, 64, 64, False, 1.0, 1.0))
    costs.note(DecodeStep(64, 65, 64, True, 1.1, 1.1))
    assert costs.needs_trial
    costs.note(DecodeStep(64, 128, 64, True, 1.1, 1.1))
    assert not costs.needs_trial


@pytest.mark.parametrize(("passed", "expected"), [(0, 320 - TURN), (2, 320 - 3 * TURN), (100, TURN)])
def test_steps_of_a_turn_that_cost_nothing_are_part_of_the_pause(passed: int, expected: int) -> None:
    """A tenth of a step is lost with each that is measured, but the first two; a pause makes that a hundredth."""
    comparison = Comparison(read_before=40)
    while not comparison.next():
        pass
    comparison.measure_again()
    while not comparison.next():
        pass
    for _ in range(TURN):
        for _ in range(passed):
            comparison.note_idle()
        comparison.note(1.1, 1.0, 1.0)
    pause = 1
    while not comparison.next():
        pause += 1
    assert pause == pytest.approx(expected, abs=passed + 2)


def test_pauses_of_a_model_that_fails_again_become_longer() -> None:
    asking, sequence, pauses = Asking(), decoding("a"), list[int]()
    costs = Costs(Line(1.0, 0.0), Line(1.0, 0.1))
    asking.took(1, 0.0)
    for _ in range(5):
        while not asking.pauses:
            asking.took(1, 0.05)
            asking.plan({sequence: 1})
            sequence.tokens.append(1)  # another one than the draft's
            asking.settle(costs, 1)
        pauses.append(asking.left)
        asking.count_steps(asking.left)
    first = pauses[0]
    assert pauses == pytest.approx([first, 2 * first, 4 * first, 4 * first, 4 * first], rel=0.2) and first > 50


def test_a_long_first_search_does_not_make_rows_seem_dear() -> None:
    """Steps take 10 s, with 64 more rows 11 s, and a plan 4 s the first time and 1 s from then on."""
    costs = StepCosts(read_before=40)
    for _ in range(20):
        costs.next()
        costs.note(DecodeStep(64, 64, 64, False, 10.0, 10.0))
    costs.note(DecodeStep(64, 128, 64, True, 15.0, 15.0, planning=4.0))
    first = costs.fit().drafted.at(128)
    assert first == pytest.approx(11.0, abs=0.5)
    for _ in range(20):
        costs.note(DecodeStep(64, 128, 64, True, 12.0, 12.0, planning=1.0))
    assert costs.fit().drafted.at(128) == pytest.approx(12.0, abs=0.1), "what each plan takes is part of it"


def test_costs_are_fitted_and_one_slow_step_does_not_overthrow_them() -> None:
    costs = StepCosts(read_before=40)

    def note(rows: int, seconds: float) -> None:
        costs.note(DecodeStep(1, rows, 1, rows > 1, seconds, seconds))

    for rows in (1, 4, 9, 17) * 20:
        note(rows, 10 + 2 * rows + 5 * (rows > 1))
    fitted = costs.fit()
    assert fitted.plain.at(1) == pytest.approx(12, rel=0.2) and fitted.drafted.at(12) == pytest.approx(39, rel=0.2)
    note(4, 1000.0)
    assert costs.fit().drafted.at(12) == pytest.approx(39, rel=0.2)
