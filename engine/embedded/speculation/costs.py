"""Measures how long steps take, with drafts and without, and decides whether speculation pays.

Estimates of single drafts can be wrong, and where a step takes half a millisecond the search for drafts is part of it.
So steps with speculation and without are compared in turns, by the tokens per second that came of them.
"""

from typing import NamedTuple

_LOST = 0.01
"""Share of the time that speculation as a whole, and that a model, may take for nothing."""
_MOST_DOUBLED = 2
"""Times that a pause of a model, or of rounds, is doubled if they have not paid several times in a row."""
_OVERHEAD = 0.004
"""Most of the time that lookup, or the question whether to ask a model, may take where it leads to nothing, as a share
of that of steps."""
_LONGEST_REST = 1024
"""Most steps without a lookup, or without asking a model, for that reason."""
_LONGEST_PAUSE, _LONGEST_PAUSE_SECONDS = 1024, 4.0
"""Most steps of a pause of either, or its most seconds if those are more steps: a trial can take as long as forty steps
of a tiny model on a GPU."""
REINVESTED = 0.25
"""Share of the time saved by drafts that speculation may take before it has to rest: behind an edit, or the end of a
repetition, it leads to nothing for a few steps."""
MOST_SAVED = 8.0
"""Most of the time that is counted as saved, in steps: what once repeated may not do so any more."""
PROBE_AFTER = 64
"""Steps after which a sequence may be drafted for again by a model that was not worth asking, one at a time; later if
the last one took more than half the share `_LOST` of their time."""
ROW_SHARE, ROW_SHARE_ON_GPU = 0.15, 0.01
"""Assumed share of a step of one row by which each further row makes it longer, on a CPU and on a GPU. On an H200 it is
0.003 for Qwen2.5 0.5B and 0.008 for Llama 8B."""
_STEPS_REMEMBERED, _OTHERS_REMEMBERED = 0.96, 0.999
"""Decay of older steps with each new one, and of those with drafts with each one without."""
_PLANNING_SHARE = 0.1
"""Weight of the last plan in what one usually takes."""
_TRIAL_SHARE = 0.003
"""Share of the time that the drafts of trials may take; looking them up, and waiting for what they follow, takes more
than that again."""
_LONGEST_BETWEEN_TRIALS = 4096
"""Most steps without a draft after which what drafts cost is tried again."""
TURN = 34
"""Steps of a turn with speculation."""
_SETTLING = 2
"""The first of them, and of a pause, which do not count: they may have begun before it."""
_MOST_LOST = 6.0
"""Time after whose loss a turn ends at once, in steps without speculation."""
_TURNS = 16
"""Turns in a row that paid, after which it is measured again what steps take without speculation."""
SHORTEST_PAUSE = 12
"""Fewest steps of a pause, and those of its beginning that are measured."""
_OTHER_LOAD = 1.25
"""Multiple of the sequences whose steps were measured in the last pause, from which on they tell little of a step."""


def pause_after(lost: float, step: float, failed: int = 0) -> int:
    """Return how many steps, of `step` seconds each, pass until so many lost seconds are little of the whole; more of
    them if it has `failed` before, in a row."""
    longest = max(_LONGEST_PAUSE, int(_LONGEST_PAUSE_SECONDS / step)) if step > 0 else _LONGEST_PAUSE
    return min(int(lost / max(_LOST * step, 1e-9)) << min(failed, _MOST_DOUBLED), longest)


def rest_after(searched: float, step: float) -> int:
    """Return how many steps, of `step` seconds each, pass until a search of so many seconds that led to nothing is
    done again."""
    return min(int(searched / (_OVERHEAD * step)), _LONGEST_REST) + 1


class Balance:
    """Counts the time that drafts of one kind have saved, less the time that they took. If they lose time, a pause
    begins. Its length makes the loss a small share of all time, and grows if drafts lose time again after a pause."""

    def __init__(self, *, remembered: float, judged_after: int, most_lost: float) -> None:
        """`remembered`: the factor by which each note reduces the sum of the older ones. Drafts are judged after
        `judged_after` notes, or as soon as they have lost the time of `most_lost` steps."""
        self._remembered, self._judged_after, self._most_lost = remembered, judged_after, most_lost
        self._saved = 0.0
        """Time that they have saved since the last pause, in steps without drafts."""
        self._noted = 0
        """Notes since then."""
        self._failed = 0
        """Pauses in a row between which they did not pay."""
        self.pause = 0
        """Steps to come without them."""

    def count_steps(self, steps: int) -> None:
        self.pause = max(self.pause - steps, 0)

    def note(self, saved: float, step: float) -> None:
        """Add the time that drafts have saved, negative if they have lost some. Its unit is a step without drafts,
        which takes `step` seconds."""
        self._saved = self._saved * self._remembered + saved
        self._noted += 1
        if self._saved >= 0 and self._noted >= self._judged_after:
            self._failed = 0
        elif self._saved < 0 and (self._noted >= self._judged_after or self._saved < -self._most_lost):
            self.pause = pause_after(-self._saved * step, step, self._failed)
            self._saved, self._noted = 0.0, 0
            self._failed += 1


class DecodeStep(NamedTuple):
    """A step that computed no prompts."""

    sequences: int
    rows: int
    tokens: int
    """Tokens that came of it, and one for each sequence that had ended before: plain steps compute those, too."""
    waited: bool
    """Whether it waited for the tokens before it, so that it could have drafts."""
    seconds: float
    """Its duration. The plan counts if it ran before the step; a model that drafts does not."""
    elapsed: float
    """The same with the model, part of whose time may be counted with the step before."""
    rounds: int = 0
    """How often the device has drafted and verified in it without the host; 0 for other steps."""
    planning: float = 0.0
    """Seconds of the plan."""


class Line(NamedTuple):
    """Seconds of a step: `base`, and `row` for each row."""

    base: float
    row: float

    def at(self, rows: int) -> float:
        return self.base + self.row * rows


_CERTAINTY = Line(0.5, 20.0)
"""Weights of the assumed costs: one step of several rows must not overthrow them."""


class Steps:
    """Fits a `Line` to measured steps by least squares; older ones count less."""

    def __init__(self) -> None:
        self._count = self._rows = self._squares = self._seconds = self._products = 0.0
        """Sums over steps, of 1, rows, rows squared, seconds, and rows times seconds."""

    def note(self, rows: int, seconds: float) -> None:
        self._fade(_STEPS_REMEMBERED)
        self._count += 1
        self._rows += rows
        self._squares += rows * rows
        self._seconds += seconds
        self._products += rows * seconds

    def age(self, steps: int) -> None:
        """Note steps of the other kind."""
        self._fade(_OTHERS_REMEMBERED**steps)

    def _fade(self, share: float) -> None:
        self._count *= share
        self._rows *= share
        self._squares *= share
        self._seconds *= share
        self._products *= share

    def fit(self, assumed: Line) -> Line:
        """Return the line; `assumed` counts as `_CERTAINTY` says. In plain arithmetic, as numpy takes longer."""
        count, squares = self._count + _CERTAINTY.base, self._squares + _CERTAINTY.row
        seconds = self._seconds + _CERTAINTY.base * assumed.base
        products = self._products + _CERTAINTY.row * assumed.row
        determinant = count * squares - self._rows * self._rows
        base = (seconds * squares - products * self._rows) / determinant
        row = (products * count - seconds * self._rows) / determinant
        return Line(max(base, 0.0), max(row, 0.001 * assumed.row))


class Costs(NamedTuple):
    """Times of steps without drafts, and of steps that waited for the tokens before them so that they could have
    drafts, whether they got any or not."""

    plain: Line
    drafted: Line


class Comparison:
    """Whether steps are with speculation. A turn with it that was slower than steps without is followed by a pause, so
    long that the time lost is little of the whole. It begins with a pause, to compare."""

    def __init__(self, read_before: int) -> None:
        """`read_before`: steps before the end of a pause from which on hidden states are read."""
        self._read_before = read_before
        self._pause = self._left = SHORTEST_PAUSE
        """Steps of the pause, and those to come."""
        self._noted = 0
        """Steps of this turn that were noted."""
        self._idle = 0
        """Steps of this turn in which nothing was looked for."""
        self._seconds = self._worth = 0.0
        """Seconds of these steps, and those in which their tokens would have come without speculation."""
        self._paid = 0
        """Turns in a row that paid."""
        self._saved = 0.0
        """Seconds that turns may lose, as others have saved more."""

    @property
    def pauses(self) -> bool:
        return self._left > 0

    @property
    def measures(self) -> bool:
        """Whether steps are noted: of a pause only the first ones, so that it costs nothing."""
        return not self.pauses or _SETTLING < self._pause - self._left + 1 <= SHORTEST_PAUSE

    @property
    def reads(self) -> bool:
        """Whether hidden states are read: of a pause only the last ones, if it is long."""
        return self._left <= self._read_before

    def next(self) -> bool:
        """Count a step; return whether it is with speculation."""
        self._left -= 1
        return not self.pauses

    def note_idle(self) -> None:
        """Note a step in which nothing was looked for: it costs nothing."""
        self._idle += 1

    def note(self, seconds: float, worth: float, plain: float) -> None:
        """Note a step with speculation: its seconds, those in which its tokens would have come without, and those of a
        step without."""
        self._noted += 1
        if self._noted <= _SETTLING:
            return
        self._seconds += seconds
        self._worth += worth
        if self._noted < TURN and self._worth - self._seconds + self._saved > -_MOST_LOST * plain:
            return
        saved, self._seconds, self._worth = self._worth - self._seconds, 0.0, 0.0
        if saved > 0:
            self._saved = min(self._saved + REINVESTED * saved, MOST_SAVED * plain)
            self._noted, self._idle = _SETTLING, 0
            self._paid += 1
            if self._paid >= _TURNS:
                self.measure_again()
            return
        lost, self._saved = max(-saved - self._saved, 0.0), max(self._saved + saved, 0.0)
        self._rest(max(pause_after(lost, plain) - self._noted - self._idle, TURN))

    def measure_again(self) -> None:
        """Begin a pause in which it is measured what steps take without."""
        self._rest(SHORTEST_PAUSE)

    def _rest(self, steps: int) -> None:
        self._pause = self._left = steps
        self._noted = self._idle = self._paid = 0
        self._seconds = self._worth = 0.0


class StepCosts:
    """Measures what steps of some number of sequences take: those in turn without speculation, and those with drafts.
    What drafts cost is forgotten in the end where none are computed, so that they are tried again."""

    def __init__(self, read_before: int, row_share: float = ROW_SHARE) -> None:
        """`read_before`: see `Comparison`; `row_share`: see `ROW_SHARE`."""
        self.comparison = Comparison(read_before)
        self._row_share = row_share
        self._sizes = range(0)
        """Sequences of steps that were measured in the last pause, from the fewest to the most."""
        self._plain, self._drafted = Steps(), Steps()
        self._usual = 0.0
        """Seconds of a step of one row without drafts, if a row costs what is assumed."""
        self._excess = [1.0, 1.0]
        """How much longer than expected the last step took, without drafts and with."""
        self._plans = 0
        """Number of steps that waited."""
        self._planning = 0.0
        """Seconds that their plans usually take."""
        self._passed = 0
        """Steps since the last that was noted."""
        self._without = 0
        """Number of steps since one with a draft for each sequence, or as many tokens, up to the last noted."""
        self._next_trial = 0
        """Number of such steps after which drafts are tried again; the first time they are at once."""
        self._fitted: Costs | None = None

    @property
    def needs_trial(self) -> bool:
        """Whether drafts should be tried again, since none were for long."""
        return self._without >= self._next_trial

    def next(self) -> bool:
        """Count a step; return whether it is with speculation."""
        self._passed += 1
        return self.comparison.next()

    def note_trial(self) -> None:
        """Note that drafts are tried."""
        self._without, self._next_trial = 0, max(self._next_trial, PROBE_AFTER)

    def note(self, step: DecodeStep) -> None:
        """Note a step. If it took much longer than expected, as when others use the processor, it counts as half as
        long again, or as much longer as the one before it took. In the comparison its plan counts in full; rows do not
        cost what a plan took longer than usual, as the first one does, which reads texts for the first time."""
        if step.rounds:  # tells nothing of what rows cost
            self._passed = 0
            if not self.comparison.pauses and (plain := self.fit().plain.at(step.sequences)):
                self._compare(step, step.elapsed, plain)
            return
        steps, self._passed = max(self._passed, 1), 0
        self._without += steps
        sequences, rows, drafted, seconds = step.sequences, step.rows, step.waited, step.seconds
        if drafted:
            self._plans += 1
            if self._plans == 2:
                self._planning = step.planning
            seconds -= min(max(step.planning - self._planning, 0.0), seconds)
            if self._plans > 2:
                self._planning += (step.planning - self._planning) * _PLANNING_SHARE
        pauses = self.comparison.pauses
        if self._usual:
            costs = self.fit()
            expected = (costs.drafted if drafted else costs.plain).at(rows)
            most = expected * max(1.5, self._excess[drafted])
            self._excess[drafted] = seconds / max(expected, 1e-9)
            seconds = min(seconds, most)
            if rows >= 2 * sequences and (plain := costs.plain.at(sequences)):  # fewer show little of what rows cost
                self._without = 0
                between = int((seconds - plain) / (_TRIAL_SHARE * plain))
                self._next_trial = min(max(between, PROBE_AFTER), _LONGEST_BETWEEN_TRIALS)
            if not pauses and (plain := costs.plain.at(sequences)):
                self._compare(step, min(step.elapsed, most + step.planning), plain)
        if drafted:
            self._drafted.note(rows, seconds)
        else:
            self._drafted.age(steps)
        if pauses and not drafted:
            fewest, end = self._sizes.start or sequences, self._sizes.stop
            self._sizes = range(min(fewest, sequences), max(end, sequences + 1))
        if not drafted and (pauses or not self._usual):
            self._plain.note(rows, seconds)
            usual = seconds / (1 + self._row_share * (rows - 1))
            self._usual += (usual - self._usual) * (0.1 if self._usual else 1)
        self._fitted = None

    def _compare(self, step: DecodeStep, seconds: float, plain: float) -> None:
        """Note a step of a turn; the turn ends where it is not known what steps of so many sequences take without."""
        fewest, most = self._sizes.start / _OTHER_LOAD, (self._sizes.stop - 1) * _OTHER_LOAD
        if fewest <= step.sequences <= most:
            self.comparison.note(seconds, plain * step.tokens / step.sequences, plain)
        else:
            self.comparison.measure_again()
        if self.comparison.pauses:
            self._sizes = range(0)

    def fit(self) -> Costs:
        if self._fitted is None:
            share = self._row_share
            plain = self._plain.fit(Line((1 - share) * self._usual, share * self._usual))
            self._fitted = Costs(plain, self._drafted.fit(plain))
        return self._fitted
