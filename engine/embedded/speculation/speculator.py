"""Chooses drafts for the next step, and measures what becomes of them.

How likely a draft is right is known from earlier ones (`acceptance.py`), what its computation costs from earlier steps
(`costs.py`); from both follows how much of it is computed (`lengths.py`). A draft model or a head is asked where no
earlier text promises as much (`asking.py`), or the device drafts and verifies several times in a row (`rounds.py`).
While speculation slows the engine down as a whole, nothing is looked for, most of the time: see `costs.Comparison`.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from itertools import islice

import torch

from engine.embedded.models.heads import ROUND_DRAFTS, ROUND_TOKENS
from engine.embedded.models.runner import StepInput
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.embedded.speculation.acceptance import Acceptance
from engine.embedded.speculation.asking import Asking
from engine.embedded.speculation.costs import MOST_SAVED, REINVESTED, ROW_SHARE, DecodeStep, StepCosts, rest_after
from engine.embedded.speculation.drafter import CLASSES, NOTHING, Draft, Drafter, HiddenStatesReader
from engine.embedded.speculation.lengths import can_pay, trial, worthwhile
from engine.embedded.speculation.rounds import RoundDrafter, Rounds
from engine.stats import SpecDecodingStats

_NEXT = 0.6
"""Assumed share of right tokens that a model drafts behind right ones."""
_MORE_READ = 8
"""Steps of a pause, beside those of a block, at whose end hidden states are read."""
_TRIED = 8
"""Sequences for which earlier text is looked up first, where it was in vain before."""
_ALWAYS_READ = 4
"""Number of sequences up to which hidden states are read, too, while a model is not asked: it drafts better the more it
has read, and it may soon be worth it."""


class Speculator:
    """Chooses drafts for the next step, and measures what becomes of them."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        most: int,
        min_speedup: float,
        context_length: int,
        lookup: Drafter | None = None,
        block_size: int = 32,
        row_share: float = ROW_SHARE,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        """A sequence has at most `most` drafted tokens in a step; a step has none unless they make it `min_speedup`
        times as fast; 0 computes every draft, whatever it costs. `lookup`: the free drafter beside one that costs.
        `block_size`: positions of a KV block, at whose beginning a head goes on behind hidden states that were not
        read. `row_share`: see `ROW_SHARE`. `clock` measures what drafts cost."""
        self.drafter = drafter
        self._lookup: Drafter | None = drafter if drafter.free else lookup
        self._model: Drafter | None = None if drafter.free else drafter
        self._reader = drafter if isinstance(drafter, HiddenStatesReader) else None
        self._rounds: Rounds | None = None
        if isinstance(drafter, RoundDrafter) and drafter.most_in_rounds:
            self._rounds = Rounds(drafter)
        self.rounds = 0
        """Number of rounds that are planned for the next step: then drafts are only room for them."""
        self._ran = 0
        """Number of rounds of the last step."""
        self._clock = clock
        self._drafts = self._draft_tokens = 0
        self._accepted = [0] * most
        """Number of accepted tokens by position in the draft."""
        self._most = most
        self._min_speedup = min_speedup
        self._context_length = context_length
        self._acceptance = Acceptance()
        self._asking = Asking()
        self._costs: dict[int, StepCosts] = {}
        """By the number of sequences in a step, roughly: each has work of its own on the host. See `_costs_of`."""
        self._read_before = block_size + _MORE_READ
        self._row_share = row_share
        self._latest = StepCosts(self._read_before, row_share)
        """The costs to which the last step was added."""
        self.planned: list[Sequence] = []
        """Sequences that have drafts."""
        self._rest = 0
        """Steps for which nothing is looked up, as it would take too long for nothing."""
        self._saved = 0.0
        """Seconds that lookup may still take for nothing, as its drafts have saved more."""
        self._was_found = False
        """Whether the last lookup led to drafts."""
        self._first_tried = 0
        """Index of the first of the sequences that were tried last."""
        self._rows = 1
        """Number of sequences that the planned step decodes."""
        self.planning = 0.0
        """Seconds that the last plan took, without those of a model."""
        self._modelled = 0.0
        """Seconds that a model took since the last step that was noted: `_asking` judges it by them."""
        self._is_noted = False
        """Whether a step was noted since the last was begun."""
        self._reads = True
        """Whether the last step's hidden states were read."""
        self._idles = False
        """Whether nothing is looked for in the planned step, though there is no pause: lookup, model and rounds rest.
        It costs nothing, so it is not measured."""

    def next_step(self, running: int) -> bool:
        """Count a step while so many sequences run; return whether drafts are to be chosen for it. Otherwise no
        sequence has one."""
        steps, self._ran = max(self._ran, 1), 0  # rounds take as long as so many steps, or longer
        self._asking.count_steps(steps)
        if self._rounds is not None:
            self._rounds.count_steps(steps)
        self._rest = max(self._rest - steps, 0)
        if not self._is_noted:  # what a model took for a step with prompts is no part of the next one
            self._modelled = 0.0
        self._is_noted = False
        active = self._latest.next() or not self._min_speedup
        self._idles = active and not (self._looks or self._asks or self.wants_rounds(running))
        if self._idles:
            self._latest.comparison.note_idle()
        elif active:
            return True
        else:
            self._modelled = 0.0
        self.planning = 0.0
        self._end_plan()
        return False

    @property
    def _looks(self) -> bool:
        """Whether earlier text is to be looked up."""
        return self._lookup is not None and self._rest <= 0

    @property
    def _asks(self) -> bool:
        """Whether a model may be asked."""
        return self._model is not None and not self._asking.rests and not (self._min_speedup and self._asking.pauses)

    def wants_rounds(self, sequences: int) -> bool:
        """Return whether so many sequences may have rounds, if the device can draw all their tokens, and nothing else
        is to be computed."""
        return self._rounds is not None and self._rounds.wants(sequences, within=0 if self._min_speedup else None)

    def plan(self, sequences: Many[Sequence], rounds: bool = False) -> bool:
        """Give sequences that decode in the next step their drafts (`Sequence.draft`); return whether one has any.
        `rounds`: they may have rounds (`wants_rounds`).

        Drafts follow the tokens that the host knows: one for a sequence with a pending token can only tell whether it
        is worth waiting for that.
        """
        self.planning = -self._clock()
        planned = self._plan(sequences, rounds)
        self.planning += self._clock()
        return planned

    def _plan(self, sequences: Many[Sequence], runs: bool) -> bool:
        self._end_plan()
        looks, asks = self._looks, self._asks
        if not (looks or asks or runs):
            return False
        started = time.thread_time()
        decoding = [s for s in sequences if s.remaining == 1 and s.status is SequenceStatus.RUNNING]
        rows = len(decoding)
        costs = self._costs_of(rows)
        tries = bool(self._min_speedup) and costs.needs_trial
        if looks and not tries and not can_pay(costs.fit(), rows, self._most, self._min_speedup):
            self._rest, looks = rest_after(time.thread_time() - started, costs.fit().plain.at(rows)), False
        if looks and self._min_speedup and not self._is_promising(decoding, tries):
            looks = self._was_found = False
            self._note_vain(time.thread_time() - started, rows)
        room_of = {s: room for s in decoding if (room := self._room(s)) > 0} if looks or asks or runs else {}
        if not room_of:
            return False
        everyone, sequences = sequences, list(room_of)
        rooms = [min(room, self._most) for room in room_of.values()]
        self._rows = rows
        self._acceptance.judge(sequences)
        drafts = [NOTHING] * len(sequences)
        if looks:
            drafts = self._look_up(sequences, rooms)
        if runs and len(room_of) == len(everyone) and self._plan_rounds(room_of, drafts):
            return True
        looked = time.thread_time() - started
        asked = self._ask(sequences, rooms, drafts, rows) if asks else []
        started = time.thread_time()
        lengths = self._lengths(sequences, drafts, rows) if any(map(_any, drafts)) else [0] * len(drafts)
        if tries and not any(lengths):
            sizes = [len(draft.tokens) for draft in drafts]
            lengths = trial(self._chances(sequences, drafts), sizes, rows, costs.fit())
            if any(lengths) and not any(sequence.pending for sequence in sequences):
                costs.note_trial()
        for sequence, draft, length in zip(sequences, drafts, lengths, strict=True):
            sequence.draft = draft.tokens[:length]
        self.planned = [sequence for sequence in sequences if sequence.draft]
        # What follows a token that is under way is not computed.
        self._asking.plan({sequences[i]: 0 if sequences[i].pending else lengths[i] for i in asked})
        looked += time.thread_time() - started
        if looks:
            self._was_found = any(lengths)
            if not self._was_found:
                self._note_vain(looked, rows)
        return any(lengths)

    def _is_promising(self, decoding: Many[Sequence], tries: bool) -> bool:
        """Return whether to look up earlier text for all of these sequences.

        If the last lookup led to no drafts, a few of them are tried first, others each time, and the rest only if it
        would pay were all like these: then less is lost in vain, so that it can be tried more often.
        """
        if self._was_found or len(decoding) <= _TRIED:
            return True
        first = self._first_tried = (self._first_tried + _TRIED) % len(decoding)
        tried = [s for s in (*decoding[first:], *decoding[:first])[:_TRIED] if self._room(s) > 0]
        self._acceptance.judge(tried)
        drafts = self._look_up(tried, [min(self._room(sequence), self._most) for sequence in tried])
        if not any(map(_any, drafts)):
            return False
        rows, times = len(decoding), -(-len(decoding) // len(tried))
        chances = list(map(list, self._chances(tried, drafts))) * times
        costs, sizes = self._costs_of(rows).fit(), [len(draft.tokens) for draft in drafts] * times
        if any(worthwhile(chances[:rows], rows, costs, self._min_speedup)):
            return True
        return tries and any(trial(chances[:rows], sizes[:rows], rows, costs))

    def _look_up(self, sequences: Many[Sequence], rooms: Many[int]) -> list[Draft]:
        """Return drafts from earlier text for sequences that were judged."""
        assert self._lookup is not None
        drafts = self._lookup.draft(sequences, rooms)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self._acceptance.note_found(sequence, draft)
        return drafts

    def _note_vain(self, seconds: float, rows: int) -> None:
        """Note that a lookup that took so many seconds led to nothing."""
        if plain := self._costs_of(rows).fit().plain.at(rows):
            self._saved -= seconds
            if self._saved < 0:
                self._rest, self._saved = rest_after(seconds, plain), 0.0

    def _plan_rounds(self, room_of: dict[Sequence, int], drafts: Many[Draft]) -> bool:
        """Plan rounds if they are worth it, and more than what was found in earlier text; return whether they are."""
        assert self._rounds is not None
        sequences, rows, promised = list(room_of), len(room_of), 0.0
        costs = self._costs_of(rows).fit()
        lengths = self._lengths(sequences, drafts, rows) if any(map(_any, drafts)) else []
        if any(lengths):
            chances = zip(self._chances(sequences, drafts), lengths, strict=True)
            right = sum(sum(islice(each, length)) for each, length in chances)
            promised = (rows + right) / max(costs.drafted.at(rows + sum(lengths)), 1e-9)
        self.rounds = self._rounds.plan(room_of, costs if self._min_speedup else None, promised)
        if self.rounds:
            for sequence in sequences:
                sequence.draft = [0] * (self.rounds * ROUND_TOKENS - 1)
            self.planned = list(sequences)
        return self.rounds > 0

    def run_rounds(self, sequences: Many[Sequence], rounds: int) -> torch.Tensor:
        """See `RoundDrafter`."""
        assert isinstance(self.drafter, RoundDrafter)
        self._ran = rounds
        return self.drafter.run_rounds(sequences, rounds)

    def end_rounds(self, sequences: Many[Sequence]) -> None:
        """See `RoundDrafter`."""
        assert isinstance(self.drafter, RoundDrafter)
        self.drafter.end_rounds(sequences)

    def read(self, step: StepInput, hidden: torch.Tensor) -> None:
        """Pass a step's hidden states on to the drafter, unless it will not be asked for long."""
        if self._reader is None:
            return
        reads = not self._min_speedup or (self._latest.comparison.reads and self._may_ask(len(step.slots)))
        if reads:
            self._reader.read(step, hidden)
        elif self._reads:
            self._reader.skip()
        self._reads = reads

    def _may_ask(self, sequences: int) -> bool:
        """Return whether hidden states that are not read now may be lacking when a model is asked."""
        if sequences <= _ALWAYS_READ or self._asking.left <= self._read_before:
            return True
        return self._rounds is not None and self._rounds.wants(sequences, within=self._read_before)

    def measures(self, sequences: int, waited: bool) -> bool:
        """Return whether a step of so many sequences is to be noted; `waited`: whether it waited for the tokens before
        it, so that it could have drafts."""
        costs = self._costs_of(sequences)
        return costs is not self._latest or (costs.comparison.measures and (waited or not self._idles))

    def note_step(self, step: DecodeStep) -> None:
        """Note how long a step took and what came of it."""
        self._latest = self._costs_of(step.sequences)
        self._is_noted = True
        if self._rounds is not None and (usual := self._latest.fit().plain.at(step.sequences)):
            self._rounds.note(step, usual, found=not self._asking.has_drafted)
        modelled = min(self._modelled, step.elapsed)
        self._modelled -= modelled
        self._latest.note(step._replace(elapsed=step.elapsed - modelled))

    def note_draft(self, sequence: Sequence, length: int, accepted: int) -> None:
        """Count a draft that was computed for a sequence, and how many of its tokens were accepted."""
        self._count(length, accepted)
        if not self._asking.has_drafted_for(sequence):  # else lookup has saved nothing
            costs = self._costs_of(self._rows).fit()
            usual = costs.plain.at(self._rows)
            saved = max(accepted * usual / self._rows - costs.drafted.row * length, 0.0)
            self._saved = min(self._saved + REINVESTED * saved, MOST_SAVED * usual)

    def note_round(self, accepted: int) -> None:
        """Count the draft of a round, and how many of its tokens were accepted."""
        self._count(ROUND_DRAFTS, accepted)

    def _count(self, length: int, accepted: int) -> None:
        self._drafts += 1
        self._draft_tokens += length
        for place in range(accepted):
            self._accepted[place] += 1

    def stats(self) -> SpecDecodingStats:
        """Return counts since the start."""
        return SpecDecodingStats(
            num_drafts=self._drafts,
            num_draft_tokens=self._draft_tokens,
            num_accepted_tokens=sum(self._accepted),
            accepted_per_position=tuple(self._accepted),
        )

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended."""
        self._acceptance.forget(sequence)
        self._asking.forget(sequence)
        if sequence in self.planned:
            self.planned.remove(sequence)
        for drafter in (self._lookup, self._model):
            if drafter is not None:
                drafter.forget(sequence)

    def _end_plan(self) -> None:
        """Take back the drafts of the last plan, and note what those of a model have brought."""
        for sequence in self.planned:
            sequence.draft = []
        self.planned, self.rounds = [], 0
        if self._asking.has_drafted:
            self._asking.settle(self._costs_of(self._rows).fit(), self._rows)

    def _costs_of(self, sequences: int) -> StepCosts:
        size = (sequences * 4 // 3).bit_length()  # 48 to 95 are one size: a full batch of 64 is often not quite full
        if (costs := self._costs.get(size)) is None:
            costs = self._costs[size] = StepCosts(self._read_before, self._row_share)
        return costs

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens may follow the next one of a sequence, up to its end."""
        if sequence.request.prefill_only or sequence.lacks_grammar:
            return 0
        output = sequence.request.sampling.max_tokens - sequence.num_output
        return min(output - 1, self._context_length - len(sequence.tokens) - 1)

    def _ask(self, sequences: Many[Sequence], rooms: Many[int], drafts: list[Draft], rows: int) -> list[int]:
        """Have a model draft where that is worth it if it is sure, or was not tried for long, unless earlier text
        promises more; put that into `drafts` and return its indices."""
        assert self._model is not None
        started = time.thread_time()
        costs = self._costs_of(rows).fit()
        guesses = [Draft([0] * room, [CLASSES - 1] * room) for room in rooms]
        limits = self._lengths(sequences, guesses, rows, self._asking.seconds)
        self._asking.begin(worth=any(limits))
        limits = [
            min(limit + sequence.pending, room) if limit else 0
            for sequence, limit, room in zip(sequences, limits, rooms, strict=True)
        ]
        asked, probes = list[int](), False
        for index, sequence in enumerate(sequences):
            if sum(self._acceptance.chances(sequence, drafts[index])) > self._asking.accepted:
                continue
            if self._asking.probes(sequence, worth=limits[index] > 0):
                limits[index], probes = min(1 + sequence.pending, rooms[index]), True
            if limits[index]:
                asked.append(index)
        if not asked:
            if self._min_speedup:
                self._asking.note_nobody(time.thread_time() - started, costs, rows)
            return []
        rate = (rows + self._asking.accepted * len(asked)) / max(costs.drafted.at(rows + len(asked)), 1e-9)
        least = (costs.drafted.row + self._asking.seconds) * rate / _NEXT if self._min_speedup else 0.0
        started = self._clock()
        found = self._model.draft([sequences[i] for i in asked], [limits[i] for i in asked], least)
        spent = self._clock() - started
        self.planning -= spent
        self._modelled += spent
        asked = [index for index, draft in zip(asked, found, strict=True) if draft.tokens]
        for index, draft in zip(asked, filter(_any, found), strict=True):
            drafts[index] = draft
            self._acceptance.note_modelled(sequences[index], draft)
        if tokens := sum(len(drafts[index].tokens) for index in asked):
            spent = self._asking.took(tokens, spent)
        if probes:
            self._asking.probed(spent, costs.plain.at(rows))
        return asked

    def _chances(self, sequences: Many[Sequence], drafts: Many[Draft]) -> Iterator[Iterator[float]]:
        """Yield for each draft the probabilities that it is right up to each of its tokens. A pending token is no gain:
        it comes in any case."""
        for sequence, draft in zip(sequences, drafts, strict=True):
            yield islice(self._acceptance.chances(sequence, draft), sequence.pending, None)

    def _lengths(self, sequences: Many[Sequence], drafts: Many[Draft], rows: int, drafting: float = 0.0) -> list[int]:
        """Return how many tokens of each draft to compute in a step that decodes `rows` sequences; `drafting` are the
        seconds that it takes to draft each of them."""
        if not self._min_speedup:
            return [len(draft.tokens) for draft in drafts]
        costs = self._costs_of(rows).fit()
        return worthwhile(self._chances(sequences, drafts), rows, costs, self._min_speedup, drafting)


def _any(draft: Draft) -> bool:
    return bool(draft.tokens)
