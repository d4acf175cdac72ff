"""The number of tokens to draft for each sequence: as many as are worth their computation, according to measurements.

A draft's next token is worth the probability that all of it up to there is right. It costs what one more row makes a
step longer. Tokens are added in order of their worth for as long as they raise the tokens per second of the whole step,
and none unless the step becomes faster by a margin. Load counts by itself: where rows are dear, drafts become short.

A draft model or a head costs time before it is known what it brings. It is asked where no earlier text promises as
much, and it pauses while it saves less time than it takes.

While speculation slows the engine down as a whole, nothing is looked for, most of the time: see `costs.Comparison`.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice

import torch

from engine.embedded.models.runner import StepInput
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.embedded.speculation.costs import (
    MOST_SAVED,
    PROBE_AFTER,
    REINVESTED,
    Costs,
    DecodeStep,
    StepCosts,
    pause_after,
)
from engine.embedded.speculation.drafter import CLASSES, NOTHING, Draft, Drafter, HiddenStatesReader
from engine.stats import SpecDecodingStats

_EXPECTED = 2 * (0.2, 0.4, 0.6, 0.8, 0.9)
"""Assumed shares of right tokens, by class, before any was seen."""
_ASSUMED = 4.0
"""Tokens that an assumption counts as."""
_MEMORY_OF_ALL, _MEMORY_OF_ONE = 0.998, 0.95
"""Decay of older observations with each new one of the same class, in the engine and in a sequence."""
_OVERHEAD = 0.004
"""Most of the time that lookup, or the question whether to ask a model, may take where it leads to nothing, as a share
of that of steps."""
_LONGEST_REST = 1024
"""Most steps without a lookup, or without asking a model, for that reason."""
_NEXT = 0.6
"""Assumed share of right tokens that a model drafts behind right ones."""
_GAIN_REMEMBERED = 0.95
_JUDGED_AFTER = 8
"""Drafts of a model after which it is known whether they pay."""
_MOST_LOST_BY_MODEL = 6.0
"""Time after whose loss that is known sooner, in steps without drafts."""
_MORE_READ = 8
"""Steps of a pause, beside those of a block, at whose end hidden states are read."""
_MOST_READING = 8.0
"""Most that counts of the time of a draft, as a multiple of the usual time."""
_TRIAL_STEPS = 2.0
"""Time that the drafts of a trial may take, in steps without any, as far as their costs are known."""


class Acceptance:
    """Shares of drafted tokens that were right, by class; older observations count less."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._right = [0.0] * CLASSES
        self._seen = [0.0] * CLASSES

    def note(self, kind: int, right: bool) -> None:
        self._right[kind] = self._right[kind] * self._memory + right
        self._seen[kind] = self._seen[kind] * self._memory + 1

    def share(self, kind: int, otherwise: float) -> float:
        """Return the share of a class, drawn towards another one as long as little has been seen."""
        return (self._right[kind] + _ASSUMED * otherwise) / (self._seen[kind] + _ASSUMED)


class Returns:
    """Whether the drafts of a model pay: the seconds that they save and take; older drafts count less."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Usual time that a model takes for a token."""
        self._is_first = True
        """Whether the model has not drafted yet."""
        self.accepted = 1.0
        """Usual number of right tokens of a draft."""
        self._gain = 0.0
        self._asked = 0
        """Number of drafts since the last pause."""
        self._pause = 0
        """Steps for which the model is not asked."""

    @property
    def pauses(self) -> bool:
        """Whether the model is not asked."""
        return self._pause > 0

    def count_step(self) -> None:
        self._pause = max(self._pause - 1, 0)

    def took(self, tokens: int, seconds: float) -> float:
        """Note the time that drafts took; return the part that counts. Reading text takes longer than usual, and
        counts; so do others at the processor, for whose sake that has a limit. The first time does not: the model may
        have to load what it finds later."""
        if self._is_first:
            self._is_first = False
            return 0.0
        counted = min(seconds / tokens, _MOST_READING * self.seconds) if self.seconds else seconds / tokens
        usual = min(counted, 2 * self.seconds) if self.seconds else counted
        self.seconds += (usual - self.seconds) * (0.1 if usual > self.seconds > 0 else 0.5)
        return counted * tokens

    def note(self, drafts: int, accepted: int, seconds: float, step: float) -> None:
        """Note what a step's drafts brought: accepted tokens, and the seconds that they saved; `step` is what a step
        takes without any. A model that loses time pauses until that is little of the whole."""
        self.accepted += (accepted / drafts - self.accepted) * (1 - _GAIN_REMEMBERED)
        self._gain = self._gain * _GAIN_REMEMBERED + seconds
        self._asked += 1
        if self._gain < 0 and (self._asked >= _JUDGED_AFTER or self._gain < -_MOST_LOST_BY_MODEL * step < 0):
            self._pause = pause_after(-self._gain, step)
            self._gain, self._asked = 0.0, 0


@dataclass(slots=True)
class _Followed:
    """A sequence that has been drafted for."""

    acceptance: Acceptance
    known: int
    """Its number of tokens when the drafts were made."""
    found: Draft = NOTHING
    """Draft of its next tokens by lookup, whether it was computed or not."""
    modelled: Draft = NOTHING
    """Draft of the same tokens by a model."""
    without: int = 0
    """Number of steps since a model drafted for it."""


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
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        """A sequence has at most `most` drafted tokens in a step; a step has none unless they make it `min_speedup`
        times as fast; 0 computes every draft, whatever it costs. `lookup`: the free drafter beside one that costs.
        `block_size`: positions of a KV block, at whose beginning a head goes on behind hidden states that were not
        read. `clock` measures what drafts cost."""
        self.drafter = drafter
        self._lookup: Drafter | None = drafter if drafter.free else lookup
        self._model: Drafter | None = None if drafter.free else drafter
        self._reader = drafter if isinstance(drafter, HiddenStatesReader) else None
        self._clock = clock
        self._drafts = self._draft_tokens = 0
        self._accepted = [0] * most
        """Number of accepted tokens by position in the draft."""
        self._most = most
        self._min_speedup = min_speedup
        self._context_length = context_length
        self._acceptance = Acceptance(_MEMORY_OF_ALL)
        self._shares = list(_EXPECTED)
        """Shares of right tokens in the engine, by class, as of the last plan."""
        self._costs: dict[int, StepCosts] = {}
        """By the number of sequences in a step, roughly: each has work of its own on the host. See `_costs_of`."""
        self._read_before = block_size + _MORE_READ
        self._latest = StepCosts(self._read_before)
        """The costs to which the last step was added."""
        self._planned: list[Sequence] = []
        """Sequences that have drafts."""
        self._followed: dict[Sequence, _Followed] = {}
        self._rest = 0
        """Steps for which nothing is looked up, as it would take too long for nothing."""
        self._unasked = 0
        """Steps to come in which no model is asked: finding out that it is not worth it takes time, too."""
        self._rested = 0
        """Steps in which it was not asked since it last could have been."""
        self._in_vain = 0
        """Times in a row that it was not worth it."""
        self._unprobed = 0
        """Steps since a sequence was drafted for only to know what that brings."""
        self._next_probe = PROBE_AFTER
        """Number of such steps after which another one may be drafted for in this way."""
        self._saved = 0.0
        """Seconds that lookup may still take for nothing, as its drafts have saved more."""
        self._rows = 1
        """Number of sequences that the planned step decodes."""
        self.planning = 0.0
        """Seconds that the last plan took, without those of a model."""
        self._returns = Returns()
        self._asked: dict[Sequence, int] = {}
        """Sequences that a model has drafted for, and how many tokens of that the step computes."""
        self._spent = 0.0
        """Seconds that it took for that."""
        self._modelled = 0.0
        """Seconds that it took since the last step that was noted: `_returns` judges it by them."""
        self._is_noted = False
        """Whether a step was noted since the last was begun."""
        self._reads = True
        """Whether the last step's hidden states were read."""

    def next_step(self) -> bool:
        """Count a step; return whether drafts are to be chosen for it. Otherwise no sequence has one."""
        self._returns.count_step()
        self._rest, self._unasked = max(self._rest - 1, 0), max(self._unasked - 1, 0)
        if not self._is_noted:  # what a model took for a step with prompts is no part of the next one
            self._modelled = 0.0
        self._is_noted = False
        if self._latest.next() or not self._min_speedup:
            return True
        self.planning = self._modelled = 0.0
        self._end_plan()
        return False

    def plan(self, sequences: Many[Sequence]) -> bool:
        """Give sequences that decode in the next step their drafts (`Sequence.draft`); return whether one has any.

        Drafts follow the tokens that the host knows: one for a sequence with a pending token can only tell whether it
        is worth waiting for that.
        """
        self.planning = -self._clock()
        planned = self._plan(sequences)
        self.planning += self._clock()
        return planned

    def _plan(self, sequences: Many[Sequence]) -> bool:
        self._end_plan()
        looks = self._lookup is not None and self._rest <= 0
        asks = self._model is not None and self._unasked <= 0 and not (self._min_speedup and self._returns.pauses)
        if not (looks or asks):
            return False
        started = time.thread_time()
        decoding = [s for s in sequences if s.remaining == 1 and s.status is SequenceStatus.RUNNING]
        rows = len(decoding)
        costs = self._costs_of(rows)
        tries = bool(self._min_speedup) and costs.needs_trial
        if looks and not tries and not self._can_pay(costs.fit(), rows):
            self._rest, looks = self._rest_after(time.thread_time() - started, costs, rows), False
        room_of = {s: room for s in decoding if (room := self._room(s)) > 0} if looks or asks else {}
        if not room_of:
            return False
        sequences, rooms = list(room_of), list(room_of.values())
        self._rows = rows
        for sequence in sequences:
            self._judge(sequence)
        self._shares = list(map(self._acceptance.share, range(CLASSES), _EXPECTED))
        drafts = [NOTHING] * len(sequences)
        if looks and self._lookup is not None:
            drafts = self._lookup.draft(sequences, rooms)
            for sequence, draft in zip(sequences, drafts, strict=True):
                self._followed[sequence].found = draft
        looked = time.thread_time() - started
        asked = self._ask(sequences, rooms, drafts, rows) if asks else []
        started = time.thread_time()
        lengths = self._lengths(sequences, drafts, rows) if any(map(_any, drafts)) else [0] * len(drafts)
        if tries and not any(lengths):
            lengths = self._trial(sequences, drafts, rows)
            if any(lengths) and not any(sequence.pending for sequence in sequences):
                costs.note_trial()
        for sequence, draft, length in zip(sequences, drafts, lengths, strict=True):
            sequence.draft = draft.tokens[:length]
        self._planned = [sequence for sequence in sequences if sequence.draft]
        # What follows a token that is under way is not computed.
        self._asked = {sequences[i]: 0 if sequences[i].pending else lengths[i] for i in asked}
        looked += time.thread_time() - started
        if looks and not any(lengths) and costs.fit().plain.at(rows):
            self._saved -= looked
            if self._saved < 0:
                self._rest, self._saved = self._rest_after(looked, costs, rows), 0.0
        return any(lengths)

    def read(self, step: StepInput, hidden: torch.Tensor) -> None:
        """Pass a step's hidden states on to the drafter, unless a pause is long."""
        if self._reader is None:
            return
        reads = not self._min_speedup or self._latest.comparison.reads
        if reads:
            self._reader.read(step, hidden)
        elif self._reads:
            self._reader.skip()
        self._reads = reads

    def measures(self, sequences: int) -> bool:
        """Return whether a step of so many sequences is to be noted."""
        return self._latest.comparison.measures or self._costs_of(sequences) is not self._latest

    def note_step(self, step: DecodeStep) -> None:
        """Note how long a step took and what came of it."""
        self._latest = self._costs_of(step.sequences)
        self._is_noted = True
        modelled = min(self._modelled, step.elapsed)
        self._modelled -= modelled
        self._latest.note(step._replace(elapsed=step.elapsed - modelled), self.planning)

    def note_draft(self, sequence: Sequence, length: int, accepted: int) -> None:
        """Count a draft that was computed for a sequence, and how many of its tokens were accepted."""
        self._drafts += 1
        self._draft_tokens += length
        if sequence not in self._asked:  # else a model drafted, and lookup has saved nothing
            costs = self._costs_of(self._rows).fit()
            usual = costs.plain.at(self._rows)
            saved = max(accepted * usual / self._rows - costs.drafted.row * length, 0.0)
            self._saved = min(self._saved + REINVESTED * saved, MOST_SAVED * usual)
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
        self._followed.pop(sequence, None)
        self._asked.pop(sequence, None)
        if sequence in self._planned:
            self._planned.remove(sequence)
        for drafter in (self._lookup, self._model):
            if drafter is not None:
                drafter.forget(sequence)

    def _end_plan(self) -> None:
        """Take back the drafts of the last plan, and note what those of a model have brought."""
        for sequence in self._planned:
            sequence.draft = []
        self._planned = []
        if self._asked:
            self._settle()

    def _costs_of(self, sequences: int) -> StepCosts:
        size = (sequences * 4 // 3).bit_length()  # 48 to 95 are one size: a full batch of 64 is often not quite full
        if (costs := self._costs.get(size)) is None:
            costs = self._costs[size] = StepCosts(self._read_before)
        return costs

    def _room(self, sequence: Sequence) -> int:
        """Return how many drafted tokens a sequence can have: with one more, they must not go beyond its end."""
        if sequence.request.prefill_only or sequence.lacks_grammar:
            return 0
        output = sequence.request.sampling.max_tokens - sequence.num_output
        return min(self._most, output - 1, self._context_length - len(sequence.tokens) - 1)

    def _judge(self, sequence: Sequence) -> None:
        """Compare the last drafts of a sequence, computed or not, with the tokens that have come since."""
        if (followed := self._followed.get(sequence)) is None:
            self._followed[sequence] = _Followed(Acceptance(_MEMORY_OF_ONE), len(sequence.tokens))
            return
        came = sequence.tokens[followed.known :]
        for draft in (followed.found, followed.modelled):
            for token, drafted, kind in zip(came, *draft, strict=False):
                self._acceptance.note(kind, token == drafted)
                followed.acceptance.note(kind, token == drafted)
                if token != drafted:
                    break
        followed.found = followed.modelled = NOTHING
        followed.known = len(sequence.tokens)

    def _settle(self) -> None:
        """Note what the last drafts of a model have brought."""
        rows, accepted = self._rows, 0
        costs = self._costs_of(rows).fit()
        for sequence, length in self._asked.items():
            if (followed := self._followed.get(sequence)) is not None:
                accepted += min(length, len(sequence.tokens) - followed.known - 1)
        usual, longer = costs.plain.at(rows), 0.0
        if computed := sum(self._asked.values()):
            longer = costs.drafted.at(rows + computed) - usual
        self._returns.note(len(self._asked), accepted, accepted * usual / rows - longer - self._spent, usual)
        self._asked, self._spent = {}, 0.0

    def _ask(self, sequences: Many[Sequence], rooms: Many[int], drafts: list[Draft], rows: int) -> list[int]:
        """Have a model draft where that is worth it if it is sure, or was not tried for long, unless earlier text
        promises more; put that into `drafts` and return its indices."""
        assert self._model is not None
        started = time.thread_time()
        costs = self._costs_of(rows).fit()
        guesses = [Draft([0] * room, [CLASSES - 1] * room) for room in rooms]
        limits = self._lengths(sequences, guesses, rows, self._returns.seconds)
        worth = any(limits)
        limits = [
            min(limit + sequence.pending, room) if limit else 0
            for sequence, limit, room in zip(sequences, limits, rooms, strict=True)
        ]
        asked, probes = list[int](), False
        self._unprobed += 1 + self._rested
        for index, sequence in enumerate(sequences):
            followed = self._followed[sequence]
            if sum(self._chances(sequence, drafts[index])) > self._returns.accepted:
                continue
            followed.without = 0 if limits[index] else followed.without + 1 + self._rested
            if followed.without >= PROBE_AFTER and self._unprobed >= self._next_probe:
                limits[index], followed.without, self._unprobed = min(1 + sequence.pending, rooms[index]), 0, 0
                probes = True
            if limits[index]:
                asked.append(index)
        self._rested = 0
        self._in_vain = 0 if worth else self._in_vain + 1
        if not asked:
            if self._min_speedup and self._in_vain > _JUDGED_AFTER and costs.plain.at(rows):
                looked = time.thread_time() - started
                self._unasked = self._rest_after(looked, self._costs_of(rows), rows)
                self._rested = self._unasked - 1
            return []
        rate = (rows + self._returns.accepted * len(asked)) / max(costs.drafted.at(rows + len(asked)), 1e-9)
        least = (costs.drafted.row + self._returns.seconds) * rate / _NEXT if self._min_speedup else 0.0
        started = self._clock()
        found = self._model.draft([sequences[i] for i in asked], [limits[i] for i in asked], least)
        spent = self._clock() - started
        self.planning -= spent
        self._modelled += spent
        asked = [index for index, draft in zip(asked, found, strict=True) if draft.tokens]
        for index, draft in zip(asked, filter(_any, found), strict=True):
            drafts[index] = self._followed[sequences[index]].modelled = draft
        if tokens := sum(len(drafts[index].tokens) for index in asked):
            self._spent = spent = self._returns.took(tokens, spent)
        if probes and (usual := costs.plain.at(rows)):
            self._next_probe = max(pause_after(spent, usual), PROBE_AFTER)
        return asked

    def _chances(self, sequence: Sequence, draft: Draft) -> Iterator[float]:
        """Yield the probabilities that a draft is right up to each of its tokens."""
        own, probability = self._followed[sequence].acceptance, 1.0
        for kind in draft.classes:
            probability *= own.share(kind, self._shares[kind])
            yield probability

    @staticmethod
    def _rest_after(looked: float, costs: StepCosts, rows: int) -> int:
        """Return at which step to go on after so many seconds that led to nothing; the time of steps is known."""
        return min(int(looked / (_OVERHEAD * costs.fit().plain.at(rows))), _LONGEST_REST) + 1

    def _can_pay(self, costs: Costs, rows: int) -> bool:
        """Return whether drafts for all of a step's sequences are worth it if every token is right."""
        plain, most = costs.plain.at(rows), 1 + self._most
        return not plain or most * plain > self._min_speedup * costs.drafted.at(most * rows)

    def _trial(self, sequences: Many[Sequence], drafts: Many[Draft], rows: int) -> list[int]:
        """Return how many tokens of each draft to compute in a step whose only use is to know what that costs: none
        unless they promise as many tokens as the step has without. A pending token is no gain."""
        promised = 0.0
        for sequence, draft in zip(sequences, drafts, strict=True):
            promised += sum(islice(self._chances(sequence, draft), sequence.pending, None))
        if promised < rows:
            return [0] * len(drafts)
        costs, lengths = self._costs_of(rows).fit(), list[int]()
        left = int(_TRIAL_STEPS * costs.plain.at(rows) / max(costs.drafted.row, 1e-9))
        for draft in drafts:
            lengths.append(min(len(draft.tokens), left))
            left -= lengths[-1]
        return lengths

    def _lengths(self, sequences: Many[Sequence], drafts: Many[Draft], rows: int, drafting: float = 0.0) -> list[int]:
        """Return how many tokens of each draft to compute in a step that decodes `rows` sequences; `drafting` are the
        seconds that it takes to draft each of them. A pending token is no gain: it comes in any case."""
        if not self._min_speedup:
            return [len(draft.tokens) for draft in drafts]
        costs = self._costs_of(rows).fit()
        lengths, row = [0] * len(drafts), costs.drafted.row + drafting
        plain, tokens, seconds = costs.plain.at(rows), float(rows), costs.drafted.at(rows)
        least = row * rows / max(plain, 1e-9)
        worth: list[tuple[float, int]] = []
        for index, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            for probability in islice(self._chances(sequence, draft), sequence.pending, None):
                if probability <= least:
                    break
                worth.append((probability, index))
        for probability, index in sorted(worth, reverse=True):
            if probability * seconds <= row * tokens:
                break
            lengths[index] += 1
            tokens += probability
            seconds += row
        if tokens * plain < self._min_speedup * rows * seconds:
            return [0] * len(drafts)
        return lengths


def _any(draft: Draft) -> bool:
    return bool(draft.tokens)
