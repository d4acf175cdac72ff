"""When the device drafts and verifies several times in a row without the host (`models/heads.py`), and how often."""

from collections.abc import Sequence as Many
from typing import Protocol, runtime_checkable

import torch

from engine.embedded.models.heads import MOST_ROUNDS, ROUND_TOKENS
from engine.embedded.sequence import Sequence
from engine.embedded.speculation.costs import Balance, Costs, DecodeStep

_LEAST = 2
"""Fewest rounds in a row: one saves the host nothing, and a step with drafts chooses how many tokens it has."""
_LONGEST = 0.01
"""Most seconds that rounds may take together: new requests wait for them. For models whose step takes longer than a
third of that the host's share is small."""
_EXPECTED_TIME, _EXPECTED_TOKENS = 1.5, 2.0
"""Assumed time of a round, in steps without drafts, and tokens of a sequence that come of it, before any was seen."""
_REMEMBERED = 0.9
"""Decay of older rounds with each new run of them."""
_BETTER = 2.0
"""While steps with drafts from earlier text are so many times as fast as rounds, there are no rounds. An edit has
nothing to look up for a token or two, and then something again: rounds would still be under way."""
_FORGOTTEN = 0.95
"""Decay of that speed with each step that has no rounds for that reason."""
_JUDGED_AFTER = 4
"""Runs of rounds after which it is known whether they pay."""
_MOST_LOST = 8.0
"""Time after whose loss that is known sooner, in steps without drafts."""
_MOST_READ = 1 << 16
"""Maximum number of keys that the tokens of a round may read for each head: each reads all keys up to its own."""


@runtime_checkable
class RoundDrafter(Protocol):
    """A drafter whose drafts the device can verify without the host."""

    most_in_rounds: int
    """Maximum number of sequences in a round; 0 if this device runs none."""

    def ready_in(self, sequences: Many[Sequence]) -> int:
        """Return after how many steps rounds of these sequences can begin, as far as is known: 0 if they can when the
        pending tokens are known, as what the sequences have then was read, or waits to be read."""
        ...

    def run_rounds(self, sequences: Many[Sequence], rounds: int) -> torch.Tensor:
        """Run rounds of sequences that are ready; see `DraftRounds.run`."""
        ...

    def end_rounds(self, sequences: Many[Sequence]) -> None:
        """Note that the sequences of the last rounds that go on have their tokens."""
        ...


class Rounds:
    """Measures what rounds bring. While they take more time than they save, there is a pause."""

    def __init__(self, drafter: RoundDrafter) -> None:
        self._drafter = drafter
        self._time = 0.0
        """Usual time of a round, in steps without drafts."""
        self._tokens = 0.0
        """Usual number of tokens of a sequence that come of a round."""
        self._found = 0.0
        """Speed of steps with drafts from earlier text, as a multiple of that of steps without drafts."""
        self._balance = Balance(remembered=_REMEMBERED, judged_after=_JUDGED_AFTER, most_lost=_MOST_LOST)
        self._rest = 0
        """Steps to come in which none can begin."""

    def wants(self, sequences: int, *, within: int | None) -> bool:
        """Return whether so many sequences may have rounds within so many steps; None if they may whatever rounds
        bring."""
        left = max(self._balance.pause, self._rest)
        return sequences <= self._drafter.most_in_rounds and (within is None or left <= within)

    def count_steps(self, steps: int) -> None:
        self._balance.count_steps(steps)
        self._rest = max(self._rest - steps, 0)

    def plan(self, room_of: dict[Sequence, int], costs: Costs | None, promised: float) -> int:
        """Return how many rounds are worth it, 0 if none. `room_of`: how many tokens of each sequence can follow its
        next one; `costs` are None if they do not matter. `promised`: tokens per second that a step with drafts
        would bring."""
        sequences, rows = list(room_of), len(room_of)
        if ROUND_TOKENS * sum(len(s.tokens) for s in sequences) > _MOST_READ:
            return 0
        room = min(room_of.values())
        count = min(MOST_ROUNDS, (room + 1) // ROUND_TOKENS)
        if count < _LEAST:
            self._rest = room + 1  # then a sequence has ended
            return 0
        if costs is not None and (usual := costs.plain.at(rows)):
            seconds = (self._time or _EXPECTED_TIME) * usual
            tokens = self._tokens or _EXPECTED_TOKENS
            count = min(count, int(_LONGEST / seconds))
            if rows * tokens < promised * seconds:
                return 0
            if self._found * seconds > _BETTER * tokens * usual:
                self._found *= _FORGOTTEN
                return 0
            if count < _LEAST:
                return 0
        self._rest = self._drafter.ready_in(sequences)
        return 0 if self._rest else count

    def note(self, step: DecodeStep, usual: float, *, found: bool) -> None:
        """Note what a step has brought. `usual`: seconds of a step without drafts; `found`: whether its drafts, if it
        has any, are from earlier text."""
        tokens, time = step.tokens / step.sequences, step.elapsed / usual
        if not step.rounds:
            if found and step.rows > step.sequences:
                self._found = _towards(self._found, tokens / time)
            return
        self._time = _towards(self._time, time / step.rounds)
        self._tokens = _towards(self._tokens, tokens / step.rounds)
        self._balance.note(tokens - time, usual)


def _towards(known: float, seen: float) -> float:
    """Return a usual value that is drawn towards what was seen; the first one if none is known."""
    return known + (seen - known) * (1 - _REMEMBERED) if known else seen
