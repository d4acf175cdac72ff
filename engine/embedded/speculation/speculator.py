"""The number of tokens to draft for each sequence: as many as are worth their computation, according to measurements.

A draft's next token is worth the probability that all of it up to there is right. It costs what one more row makes a
step longer. Tokens are added in order of their worth for as long as they raise the tokens per second of the whole step,
and none unless the step becomes faster by a margin. Load counts by itself: where rows are dear, drafts become short.
"""

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.embedded.sequence import Sequence, SequenceStatus
from engine.embedded.speculation.drafter import CLASSES, NOTHING, Draft, Drafter, HiddenStatesReader
from engine.embedded.step import Chunk
from engine.stats import SpecDecodingStats

_EXPECTED = (0.2, 0.4, 0.6, 0.8, 0.9)
"""Assumed shares of right tokens, by class, before any was seen."""
_ASSUMED = 4.0
"""Tokens that an assumption counts as."""
_MEMORY_OF_ALL, _MEMORY_OF_ONE = 0.998, 0.95
"""Decay of older observations with each new one of the same class, in the engine and in a sequence."""
_ROW_SHARE = 0.15
"""Assumed share of a step of one row by which each further row makes it longer."""
_CERTAINTY: NDArray[np.float64] = np.array([0.5, 20.0, 4.0])
"""Weights of the assumed costs of a base, a row and a draft: one step of several rows must not overthrow them."""
_STEPS_REMEMBERED = 0.98
_OVERHEAD = 0.004
"""Most of the time that drafting may take where it leads to nothing, as a share of that of steps."""
_LONGEST_REST = 16
_PROBE_AFTER = 64
"""Steps after which a sequence without drafts gets one, if its drafter can be judged in no other way."""


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


class Cost(NamedTuple):
    """Seconds of a step: `base`, `row` for each row, and `drafted` more if there are drafts in it."""

    base: float
    row: float
    drafted: float

    def of(self, rows: int, drafted: bool) -> float:
        return self.base + self.row * rows + self.drafted * drafted


class StepCosts:
    """Fits a `Cost` to measured steps by least squares; older ones count less."""

    def __init__(self) -> None:
        self._products: NDArray[np.float64] = np.zeros((3, 3))
        self._sums: NDArray[np.float64] = np.zeros(3)
        self._usual = 0.0
        """Seconds of a step of one row, if a row costs what is assumed."""
        self._fitted: Cost | None = None

    def note(self, rows: int, drafted: bool, seconds: float) -> None:
        """Note a step without prompts. One that took much longer than expected, as when others use the processor,
        counts as half as long again."""
        if self._usual:
            seconds = min(seconds, 1.5 * self.fit().of(rows, drafted))
        usual = seconds / (1 + _ROW_SHARE * (rows - 1))
        self._usual += (usual - self._usual) * (0.1 if self._usual else 1)
        features = np.array([1.0, rows, drafted])
        self._products = self._products * _STEPS_REMEMBERED + np.outer(features, features)
        self._sums = self._sums * _STEPS_REMEMBERED + features * seconds
        self._fitted = None

    def fit(self) -> Cost:
        if self._fitted is None:
            assumed = np.array([(1 - _ROW_SHARE) * self._usual, _ROW_SHARE * self._usual, 0.0])
            found = np.linalg.solve(self._products + np.diag(_CERTAINTY), self._sums + assumed * _CERTAINTY)
            least = 0.001 * self._usual
            self._fitted = Cost(max(float(found[0]), 0.0), max(float(found[1]), least), max(float(found[2]), 0.0))
        return self._fitted


@dataclass(slots=True)
class _Followed:
    """A sequence that has been drafted for."""

    acceptance: Acceptance
    known: int
    """Its number of tokens when `draft` was made."""
    draft: Draft = NOTHING
    """Draft of its next tokens, whether it was computed or not."""
    without: int = 0
    """Number of steps since its last draft."""


class Speculator:
    """Chooses drafts for the next step, and measures what becomes of them."""

    def __init__(self, drafter: Drafter, *, most: int, min_speedup: float, context_length: int) -> None:
        """A sequence has at most `most` drafted tokens in a step; a step has none unless they make it `min_speedup`
        times as fast; 0 computes every draft, whatever it costs."""
        self.drafter = drafter
        self._drafts = self._draft_tokens = 0
        self._accepted = [0] * most
        """Number of accepted tokens by position in the draft."""
        self._most = most
        self._min_speedup = min_speedup
        self._context_length = context_length
        self._acceptance = Acceptance(_MEMORY_OF_ALL)
        self._costs = StepCosts()
        self._followed: dict[Sequence, _Followed] = {}
        self._fruitless = 0
        """Number of drafts in a row that were made by a drafter that costs, and not computed."""
        self._rest = 0
        """Steps for which nothing is drafted, as it would take too long for nothing."""

    def plan(self, sequences: Many[Sequence]) -> bool:
        """Give sequences that decode in the next step their drafts (`Sequence.draft`); return whether one has any.

        Drafts follow the tokens that the host knows: one for a sequence with a pending token can only tell whether it
        is worth waiting for that.
        """
        for sequence in sequences:
            sequence.draft = []
        if self._rest > 0:
            self._rest -= 1
            return False
        started = time.thread_time()
        decoding = [s for s in sequences if s.remaining == 1 and s.status is SequenceStatus.RUNNING]
        room_of = {sequence: room for sequence in decoding if (room := self._room(sequence)) > 0}
        if not room_of:
            return False
        sequences, rooms = list(room_of), list(room_of.values())
        for sequence in sequences:
            self._judge(sequence)
        if self.drafter.free:
            drafts = self.drafter.draft(sequences, rooms)
        else:
            drafts = self._draft_worthwhile(sequences, rooms, len(decoding))
        lengths = self._lengths(sequences, drafts, len(decoding))
        for sequence, draft, length in zip(sequences, drafts, lengths, strict=True):
            followed = self._followed[sequence]
            followed.draft, followed.known = draft, len(sequence.tokens)
            sequence.draft = draft.tokens[:length]
        if any(lengths):
            self._fruitless = 0
            return True
        if not self.drafter.free:
            self._fruitless += 1
            self._rest = min(2 ** (self._fruitless - 1), _PROBE_AFTER) - 1
            return False
        if usual := self._costs.fit().of(len(decoding), False):
            self._rest = min(int((time.thread_time() - started) / (_OVERHEAD * usual)), _LONGEST_REST)
        return False

    def read(self, chunks: Many[Chunk], hidden: torch.Tensor) -> None:
        """Pass a step's hidden states on to the drafter."""
        if isinstance(self.drafter, HiddenStatesReader):
            self.drafter.read(chunks, hidden)

    def note_step(self, rows: int, drafted: bool, seconds: float) -> None:
        """Note how long a step took that computed no prompts."""
        self._costs.note(rows, drafted, seconds)

    def note_draft(self, length: int, accepted: int) -> None:
        """Count a draft that was computed, and how many of its tokens were accepted."""
        self._drafts += 1
        self._draft_tokens += length
        for place in range(accepted):
            self._accepted[place] += 1

    def stats(self) -> SpecDecodingStats:
        """Return what has been counted since the start."""
        return SpecDecodingStats(
            num_drafts=self._drafts,
            num_draft_tokens=self._draft_tokens,
            num_accepted_tokens=sum(self._accepted),
            accepted_per_position=tuple(self._accepted),
        )

    def forget(self, sequence: Sequence) -> None:
        """Give up what is kept for a sequence that has ended."""
        self._followed.pop(sequence, None)
        self.drafter.forget(sequence)

    def _room(self, sequence: Sequence) -> int:
        """Return how many drafted tokens a sequence can have: with one more, they must not go beyond its end."""
        if sequence.request.prefill_only or sequence.lacks_grammar:
            return 0
        output = sequence.request.sampling.max_tokens - sequence.num_output
        return min(self._most, output - 1, self._context_length - len(sequence.tokens) - 1)

    def _judge(self, sequence: Sequence) -> None:
        """Compare the last draft of a sequence, computed or not, with the tokens that have come since."""
        if (followed := self._followed.get(sequence)) is None:
            self._followed[sequence] = _Followed(Acceptance(_MEMORY_OF_ONE), len(sequence.tokens))
            return
        came = sequence.tokens[followed.known :]
        for token, drafted, kind in zip(came, *followed.draft, strict=False):
            self._acceptance.note(kind, token == drafted)
            followed.acceptance.note(kind, token == drafted)
            if token != drafted:
                break

    def _draft_worthwhile(self, sequences: Many[Sequence], rooms: Many[int], rows: int) -> list[Draft]:
        """Have drafts made where they are worth it if the drafter is sure, or have not been tried for long."""
        guesses = [Draft([0] * room, [CLASSES - 1] * room) for room in rooms]
        limits = self._lengths(sequences, guesses, rows)
        for index, sequence in enumerate(sequences):
            followed = self._followed[sequence]
            followed.without = 0 if limits[index] else followed.without + 1
            if followed.without >= _PROBE_AFTER:
                limits[index], followed.without = 1, 0
        asked = [index for index, limit in enumerate(limits) if limit]
        found = self.drafter.draft([sequences[i] for i in asked], [limits[i] for i in asked]) if asked else []
        drafts = [NOTHING] * len(sequences)
        for index, draft in zip(asked, found, strict=True):
            drafts[index] = draft
        return drafts

    def _lengths(self, sequences: Many[Sequence], drafts: Many[Draft], rows: int) -> list[int]:
        """Return how many tokens of each draft to compute in a step that decodes `rows` sequences."""
        if not self._min_speedup:
            return [len(draft.tokens) for draft in drafts]
        cost = self._costs.fit()
        lengths = [0] * len(drafts)
        plain, tokens, seconds = cost.of(rows, False), float(rows), cost.of(rows, True)
        least = cost.row * rows / max(plain, 1e-9)
        worth: list[tuple[float, int]] = []
        for index, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            own, probability = self._followed[sequence].acceptance, 1.0
            for kind in draft.classes:
                probability *= own.share(kind, self._acceptance.share(kind, _EXPECTED[kind]))
                if probability <= least:
                    break
                worth.append((probability, index))
        for probability, index in sorted(worth, reverse=True):
            if probability * seconds <= cost.row * tokens:
                break
            lengths[index] += 1
            tokens += probability
            seconds += cost.row
        if tokens * plain < self._min_speedup * rows * seconds:
            return [0] * len(drafts)
        return lengths
