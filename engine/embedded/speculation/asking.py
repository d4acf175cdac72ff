"""When a draft model or a head is asked, which costs time before it is known what it brings."""

from typing import NamedTuple

from engine.embedded.sequence import Sequence
from engine.embedded.speculation.costs import PROBE_AFTER, Balance, Costs, pause_after, rest_after

_REMEMBERED = 0.95
"""Decay of what earlier drafts brought with those of each step."""
_JUDGED_AFTER = 8
"""Steps after which it is known whether a model's drafts pay, or that no sequence is worth asking for."""
_MOST_LOST = 6.0
"""Time after whose loss that is known sooner, in steps without drafts."""
_MOST_RESTED = 0.25
"""Most seconds that the model rests until the next probe: fewer sequences may be worth asking for sooner."""
_MOST_READING = 8.0
"""Most that counts of the time of a draft, as a multiple of the usual time."""


class _ComputedDraft(NamedTuple):
    """The part of a model's draft that a step computes."""

    known: int
    """Number of the sequence's tokens before it."""
    length: int
    """Number of drafted tokens in this part."""


class Asking:
    """Whether the drafts of a model pay, and which sequences it drafts for.

    While it saves less time than it takes, it pauses. While no sequence is worth asking for, that is not found out in
    each step either; but one that was not drafted for in a long time is, one at a time, to know what that brings.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Usual time that the model takes for a token."""
        self.accepted = 1.0
        """Usual number of right tokens of a draft."""
        self._is_first = True
        """Whether the model has not drafted yet."""
        self._balance = Balance(remembered=_REMEMBERED, judged_after=_JUDGED_AFTER, most_lost=_MOST_LOST)
        self._rest = 0
        """Steps to come in which it is not asked, since no sequence is worth it: finding that out takes time, too."""
        self._rested = 0
        """Steps of the last rest that `begin` has yet to count."""
        self._in_vain = 0
        """Times in a row that no sequence was worth it."""
        self._passed = 0
        """Steps since the model was last asked or could have been."""
        self._without: dict[Sequence, int] = {}
        """Steps since it drafted for a sequence."""
        self._unprobed = 0
        """Steps since a sequence was drafted for only to know what that brings."""
        self._next_probe = PROBE_AFTER
        """Number of such steps after which another one may be."""
        self._drafts: dict[Sequence, _ComputedDraft] = {}
        """Drafts of the model in the step that is planned."""
        self._spent = 0.0
        """Seconds that these took."""

    @property
    def pauses(self) -> bool:
        """Whether the model is not asked, since its drafts do not pay."""
        return self._balance.pause > 0

    @property
    def rests(self) -> bool:
        """Whether it is not asked, since no sequence is worth it."""
        return self._rest > 0

    @property
    def left(self) -> int:
        """Number of steps to come in which it is not asked."""
        return max(self._balance.pause, self._rest)

    @property
    def has_drafted(self) -> bool:
        """Whether the planned step has drafts of the model."""
        return bool(self._drafts)

    def count_steps(self, steps: int) -> None:
        self._balance.count_steps(steps)
        self._rest = max(self._rest - steps, 0)

    def begin(self, worth: bool) -> None:
        """Begin to choose the sequences of a step; `worth` says whether one is worth asking for."""
        self._passed, self._rested = 1 + self._rested, 0
        self._unprobed += self._passed
        self._in_vain = 0 if worth else self._in_vain + 1

    def probes(self, sequence: Sequence, worth: bool) -> bool:
        """Count a step of a sequence, for which asking is worth it or not; return whether to ask only to know what that
        brings."""
        without = 0 if worth else self._without.get(sequence, 0) + self._passed
        probes = without >= PROBE_AFTER and self._unprobed >= self._next_probe
        if probes:
            without = self._unprobed = 0
        self._without[sequence] = without
        return probes

    def note_nobody(self, seconds: float, costs: Costs, rows: int) -> None:
        """Note that it took so many seconds to find that there is nobody to ask for."""
        if self._in_vain > _JUDGED_AFTER and (usual := costs.plain.at(rows)):
            probe = min(self._next_probe - self._unprobed, int(_MOST_RESTED / usual))
            self._rest = max(rest_after(seconds, usual), probe)
            self._rested = self._rest - 1

    def took(self, tokens: int, seconds: float) -> float:
        """Note the time that the drafts of a step took; return the part that counts. Reading text takes longer than
        usual, and counts; so do others at the processor, for whose sake that has a limit. The first time does not: the
        model may have to load what it finds later."""
        if self._is_first:
            self._is_first = False
            self._spent = 0.0
            return 0.0
        counted = min(seconds / tokens, _MOST_READING * self.seconds) if self.seconds else seconds / tokens
        usual = min(counted, 2 * self.seconds) if self.seconds else counted
        self.seconds += (usual - self.seconds) * (0.1 if usual > self.seconds > 0 else 0.5)
        self._spent = counted * tokens
        return self._spent

    def probed(self, seconds: float, step: float) -> None:
        """Note that a probe took so many seconds; the next one waits until that is little of the time of steps."""
        if step:
            self._next_probe = max(pause_after(2 * seconds, step), PROBE_AFTER)

    def plan(self, lengths: dict[Sequence, int]) -> None:
        """Note how many tokens of each draft of the model the step computes."""
        self._drafts = {sequence: _ComputedDraft(len(sequence.tokens), length) for sequence, length in lengths.items()}

    def has_drafted_for(self, sequence: Sequence) -> bool:
        """Return whether the planned step has a draft of the model for a sequence."""
        return sequence in self._drafts

    def settle(self, costs: Costs, rows: int) -> None:
        """Note what the drafts of the planned step have brought, which decoded `rows` sequences."""
        usual, longer, accepted = costs.plain.at(rows), 0.0, 0
        for sequence, (known, length) in self._drafts.items():
            accepted += min(length, len(sequence.tokens) - known - 1)
        if computed := sum(length for _, length in self._drafts.values()):
            longer = costs.drafted.at(rows + computed) - usual
        self.accepted += (accepted / len(self._drafts) - self.accepted) * (1 - _REMEMBERED)
        if usual:
            self._balance.note(accepted / rows - (longer + self._spent) / usual, usual)
        self._drafts, self._spent = {}, 0.0

    def forget(self, sequence: Sequence) -> None:
        self._without.pop(sequence, None)
        self._drafts.pop(sequence, None)
