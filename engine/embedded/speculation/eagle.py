"""An EAGLE-3 head drafts from the model's own hidden states.

It has keys and values of its own for the positions it has read, in blocks that are numbered as the model's: a
sequence's blocks are its blocks here, too. Drafted positions lie in blocks of its own behind those. A sequence is read
when it is drafted for: from where it was computed here, or from the last positions on whose hidden states are kept.
"""

import logging
from collections import deque
from collections.abc import Sequence as Many
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.checkpoints.eagle import read_eagle_head
from engine.checkpoints.facts import read_model_facts
from engine.config import EmbeddedConfig
from engine.embedded.models.devices import to_device
from engine.embedded.models.heads import (
    MOST_READ,
    ROUND_DRAFTS,
    ROUND_TOKENS,
    DraftRounds,
    HeadStep,
    RoundStart,
    most_read,
)
from engine.embedded.models.runner import ModelRunner, StepInput
from engine.embedded.sequence import Sequence
from engine.embedded.speculation.drafter import NOTHING, Draft, class_of_probability
from engine.errors import EngineFailure

log = logging.getLogger(__name__)

_KEPT_OF_ALL = MOST_READ
"""Number of hidden states up to which those of steps are kept for sequences that are not drafted for."""
_KEPT = 512
"""Maximum number of hidden states of a sequence that wait to be read."""
_VIEWS = 8
"""Maximum number of steps whose hidden states are kept in memory for a row of each."""
_CATCH_UP = 64
"""Maximum number of positions of a sequence that are read at once on a CPU, where each takes long."""


class _Rows(NamedTuple):
    """Rows of a step's hidden states that are of one sequence."""

    first: int
    start: int
    """Position of the first."""
    length: int


class _Step:
    """Hidden states of a step, [tokens, width]."""

    def __init__(self, number: int, step: StepInput, hidden: torch.Tensor) -> None:
        self.number = number
        self.hidden = hidden
        self._admissions, self._starts, self._lengths = map(tuple, (step.admissions, step.starts, step.lengths))

    def rows_of(self, admission: int) -> _Rows | None:
        """Return the rows of the sequence with this admission."""
        if admission not in self._admissions:
            return None
        index = self._admissions.index(admission)
        return _Rows(sum(self._lengths[:index]), self._starts[index], self._lengths[index])


class HeadReading:
    """The head's state for a sequence: the positions it has read, and the hidden states it has yet to read."""

    def __init__(self, admission: int, start: int, size: int) -> None:
        """`size`: positions of a block."""
        self.admission = admission
        self.step = 0
        """Number of the last step whose hidden states it has been given."""
        self._size = size
        self.first = self.end = self._block_from(start)
        """Positions that have keys and values: from the one, before the other."""
        self.waiting: list[torch.Tensor] = []
        """Hidden states of the positions from `end` on."""
        self.count = 0
        self._views = 0
        """How many of them, counted from the last, are views. Each keeps all hidden states of its step in memory."""

    def keep(self, start: int, hidden: torch.Tensor) -> None:
        """Take hidden states of the positions from `start` on. Those that were there are of other tokens. Behind a gap
        they are taken from the next block on, since a block has keys and values of all its positions."""
        if self.first < self.end and self.first <= start < self.end:
            self._hold(start, [])
        elif not self.end <= start <= self.end + self.count:
            self.first = self._block_from(start)
            self._hold(self.first, [])
            hidden, start = hidden[max(self.first - start, 0) :], max(start, self.first)
            if not len(hidden):
                return
        elif start < self.end + self.count:
            self._hold(self.end, [_joined(self.waiting)[: start - self.end]])
        self.waiting.append(hidden)
        self._views += 1
        self.count += len(hidden)
        if self.count > _KEPT:
            end = self.end + self.count
            self.first = (end - _KEPT // 2) // self._size * self._size
            self._hold(self.first, [_copied(_joined(self.waiting)[self.first - end :])])
        elif self._views > _VIEWS:
            self.waiting[-self._views :] = [_joined(self.waiting[-self._views :])]
            self._views = 0

    def take(self, count: int) -> torch.Tensor:
        """Return the first hidden states that wait; they are read."""
        whole = _joined(self.waiting)
        self._hold(self.end + count, [whole[count:]] if count < len(whole) else [])
        return whole[:count]

    def leave_out(self, known: int, most: int) -> None:
        """Forget what waits but for the last `most` positions before `known`, from the beginning of a block on."""
        first = min(self._block_from(known - most), self.end + self.count)
        self._hold(first, [_copied(_joined(self.waiting)[first - self.end :])])
        self.first = first

    def skip_to(self, end: int, step: int) -> None:
        """Note that all positions before `end` have keys and values, and that steps up to this one are known."""
        self._hold(end, [])
        self.step = step

    def drop(self) -> None:
        """Forget the hidden states that wait, some of which may be of other tokens by now."""
        self._hold(self.end, [])

    def _block_from(self, position: int) -> int:
        """Return the first position of a block, from a position on."""
        return -(-position // self._size) * self._size

    def _hold(self, end: int, waiting: list[torch.Tensor]) -> None:
        self.end, self.waiting, self._views = end, waiting, len(waiting)
        self.count = sum(map(len, waiting))


class Eagle:
    """The `Drafter` that is an EAGLE-3 head, and a `RoundDrafter`."""

    free = False
    runner = None

    def __init__(self, config: EmbeddedConfig, target: ModelRunner) -> None:
        """Load the head. Raises EngineFailure if that fails, or if it is of another model."""
        if target.groups[0].window is not None:
            raise EngineFailure("SPECULATIVE=eagle3 needs a model with layers that attend to everything")
        head = read_eagle_head(Path(config.speculative_model), read_model_facts(Path(config.model)))
        self._size, self._blocks = config.kv_block_size, target.groups[0].num_blocks
        self._spare = -(-config.speculative_tokens // self._size) + 1
        """Blocks of a slot for drafted positions."""
        self._on_cpu = target.device.type == "cpu"
        self._head = target.load_head(head, config.max_batch_size * self._spare)
        self.most_in_rounds = self._head.rounds.most_sequences if self._head.rounds is not None else 0
        self._readers: dict[Sequence, HeadReading] = {}
        self._steps: deque[_Step] = deque()
        self._number = self._rows = 0
        log.info("the EAGLE-3 head in %s drafts for the model in %s", head.folder, config.model)

    def read(self, step: StepInput, hidden: torch.Tensor) -> None:
        """See `HiddenStatesReader`."""
        count = len(step.tokens)
        self._number += 1
        self._rows += count
        kept = hidden[:count] if self._on_cpu else hidden[:count].clone()
        self._steps.append(_Step(self._number, step, kept))
        while self._rows > _KEPT_OF_ALL and len(self._steps) > 1:
            self._rows -= len(self._steps.popleft().hidden)

    def skip(self) -> None:
        """See `HiddenStatesReader`. What was kept until now may be of drafted tokens that proved wrong, which nothing
        that is read later would show."""
        self._steps.clear()
        self._rows = 0
        self._number += 1

    def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
        """See `Drafter`. Reads positions whose hidden states wait and whose next token is known: others were computed
        for tokens of drafts that proved wrong, or the next one is under way."""
        drafts, places, most = [NOTHING] * len(sequences), list[int](), list[int]()
        step = HeadStep([], [], [], [], [], torch.empty(0))
        inputs: list[torch.Tensor] = []
        each = _CATCH_UP if self._on_cpu else most_read(len(sequences))
        readers = self._readings(sequences)
        for index, (sequence, reader, limit) in enumerate(zip(sequences, readers, limits, strict=True)):
            if reader is None:
                continue
            start, known = reader.end, len(sequence.tokens) - 1
            count = min(reader.count, known - start, each)
            if count <= 0:
                continue
            places.append(index)
            most.append(limit if start + count == known else 0)
            inputs.append(reader.take(count))
            self._add(step, sequence, reader, start, count, most[-1])
        if places:
            step = step._replace(inputs=_joined(inputs))
            for index, found in zip(places, self._head.draft(step, most, least), strict=True):
                if found.tokens:
                    drafts[index] = Draft(found.tokens, list(map(class_of_probability, found.probabilities)))
        return drafts

    def ready_in(self, sequences: Many[Sequence]) -> int:
        """See `RoundDrafter`. A sequence that was not read for a while is read again from its next block on."""
        readers, lacking, most = self._readings(sequences), list[int](), most_read(len(sequences))
        steps = 0
        for sequence, reader in zip(sequences, readers, strict=True):
            if reader is None:
                steps = max(steps, 1)
                continue
            known = len(sequence.tokens) - 1 + sequence.pending
            if known - reader.end > most:
                reader.leave_out(known, most)
            lacking.append(known - reader.end)
            if not 0 <= lacking[-1] <= reader.count:
                steps = max(steps, 1 - lacking[-1], 1)
        if steps or all(lacking) or (not any(lacking) and self._on_device.goes_on(self._starts(sequences))):
            return steps
        return 1

    def run_rounds(self, sequences: Many[Sequence], rounds: int) -> torch.Tensor:
        """See `RoundDrafter`."""
        step, inputs = HeadStep([], [], [], [], [], torch.empty(0)), list[torch.Tensor]()
        starts = self._starts(sequences)
        for sequence in sequences:
            reader = self._readers[sequence]
            start, count = reader.end, len(sequence.tokens) - 1 - reader.end
            if count:
                inputs.append(reader.take(count))
            self._add(step, sequence, reader, start, count, rounds * ROUND_TOKENS + ROUND_DRAFTS - 1)
        if inputs:
            step = step._replace(inputs=_joined(inputs))
        self.skip()  # what is computed meanwhile is read meanwhile
        return self._on_device.run(starts, step, rounds)

    def end_rounds(self, sequences: Many[Sequence]) -> None:
        """See `RoundDrafter`."""
        for sequence in sequences:
            self._readers[sequence].skip_to(len(sequence.tokens) - 1, self._number)
        self._on_device.note_taken(self._starts(sequences))

    @property
    def _on_device(self) -> DraftRounds:
        assert self._head.rounds is not None
        return self._head.rounds

    def _starts(self, sequences: Many[Sequence]) -> list[RoundStart]:
        """Return where the head, and the model, go on: the last token of each, and the first of its table."""
        return [
            RoundStart(
                sequence.slot,
                sequence.admission,
                len(sequence.tokens) - 1,
                sequence.tokens[-1],
                self._readers[sequence].first // self._size * self._size,
            )
            for sequence in sequences
        ]

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._readers.pop(sequence, None)

    def _readings(self, sequences: Many[Sequence]) -> list[HeadReading | None]:
        """Return sequences' states with the hidden states of all steps that are kept; None where there are none. They
        are gathered at once: the rows of many steps and sequences are too many to touch one by one."""
        readers, runs, rows = list[HeadReading | None](), list[tuple[HeadReading, int, int]](), list[int]()
        firsts, hidden, total = dict[int, int](), list[torch.Tensor](), 0
        for sequence in sequences:
            reader, end = self._known(sequence), -1
            seen = 0 if reader is None else reader.step
            for step in self._steps:
                found = step.rows_of(sequence.admission) if step.number > seen else None
                if found is None:
                    continue
                if step.number not in firsts:
                    firsts[step.number] = total
                    hidden.append(step.hidden)
                    total += len(step.hidden)
                if reader is None:
                    reader = self._readers[sequence] = HeadReading(sequence.admission, found.start, self._size)
                if found.start == end:  # many steps of one token each are one run
                    _, start, length = runs.pop()
                    runs.append((reader, start, length + found.length))
                else:
                    runs.append((reader, found.start, found.length))
                end = found.start + found.length
                first = firsts[step.number] + found.first
                rows += range(first, first + found.length)
            if reader is not None:
                reader.step = self._number
            readers.append(reader)
        if rows:
            parts = _taken(_joined(hidden), rows).split([length for _, _, length in runs])  # type: ignore[no-untyped-call]
            for (reader, start, _), part in zip(runs, parts, strict=True):
                reader.keep(start, part)
        return readers

    def _known(self, sequence: Sequence) -> HeadReading | None:
        """Return a sequence's state, unless that is of an earlier admission."""
        reader = self._readers.get(sequence)
        if reader is None:
            return None
        if reader.admission != sequence.admission:
            del self._readers[sequence]
            return None
        if self._steps and self._steps[0].number > reader.step + 1:
            reader.drop()
        return reader

    def _add(self, step: HeadStep, sequence: Sequence, reader: HeadReading, start: int, count: int, limit: int) -> None:
        """Add a sequence's positions to a step. Tables begin with the block of the first position that the head has
        read."""
        skipped = reader.first // self._size
        table = sequence.tables[0][skipped:]
        lacking = -(-(start + count + limit) // self._size) - skipped - len(table)
        own = self._blocks + sequence.slot * self._spare
        step.tokens.extend(sequence.tokens[start + 1 : start + 1 + count])
        step.positions.extend(range(start, start + count))
        step.starts.append(start - skipped * self._size)
        step.lengths.append(count)
        step.tables.append([*table, *range(own, own + lacking)])


# On a CPU numpy copies what it knows: torch would start threads, which take turns with the decoder's.


def _copied(rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows.numpy().copy()) if _is_known(rows) else rows.clone()


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Return rows in one tensor."""
    if len(pieces) == 1:
        return pieces[0]
    if _is_known(pieces[0]):
        return torch.from_numpy(np.concatenate([piece.numpy() for piece in pieces]))
    return torch.cat(pieces)


def _taken(rows: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return these rows in a tensor of their own, or all of them as they are."""
    if indices == list(range(len(rows))):
        return rows
    if _is_known(rows):
        return torch.from_numpy(rows.numpy()[indices])
    return rows[to_device(indices, torch.int64, rows.device)]


def _is_known(rows: torch.Tensor) -> bool:
    return rows.is_cpu and rows.dtype == torch.float32
