"""An EAGLE-3 head drafts from the model's own hidden states.

It has keys and values of its own for the positions it has read, in blocks that are numbered as the model's: a
sequence's blocks are its blocks here, too. Drafted positions lie in blocks of its own behind those. A sequence is read
from where it was computed here, and from the last few hundred tokens on if nothing was drafted for so long.
"""

import logging
from collections.abc import Sequence as Many
from pathlib import Path

import torch

from engine.checkpoints.eagle import read_eagle_head
from engine.checkpoints.facts import read_model_facts
from engine.config import EmbeddedConfig
from engine.embedded.models.heads import HeadStep
from engine.embedded.models.runner import ModelRunner
from engine.embedded.sequence import Sequence
from engine.embedded.speculation.drafter import NOTHING, Draft, class_of_probability
from engine.embedded.step import Chunk
from engine.errors import EngineFailure

log = logging.getLogger(__name__)

_KEPT = 512
"""Maximum number of hidden states of a sequence that wait to be read."""
_PIECES = 8
"""Maximum number of tensors that hold them. Each is a view that keeps the hidden states of a whole step in memory."""
_CATCH_UP = 64
"""Maximum number of positions of a sequence that are read before it is drafted for."""


class HeadReading:
    """The head's state for a sequence: the positions it has read, and the hidden states it has yet to read."""

    def __init__(self, admission: int, start: int, size: int) -> None:
        """`size`: positions of a block."""
        self.admission = admission
        self._size = size
        self.first = self.end = start
        """Positions that have keys and values: from the one, before the other."""
        self.waiting: list[torch.Tensor] = []
        """Hidden states of the positions from `end` on."""
        self.count = 0

    def keep(self, start: int, hidden: torch.Tensor) -> None:
        """Take hidden states of the positions from `start` on. Those that were there are of other tokens."""
        if not self.end <= start <= self.end + self.count:
            self.first = min(start, self.first) if start < self.end else start
            self.end, self.waiting = start, []
        elif start < self.end + self.count:
            self.waiting = [torch.cat(self.waiting)[: start - self.end]]
        self.waiting.append(hidden)
        self.count = start - self.end + len(hidden)
        if self.count > _KEPT:
            end = self.end + self.count
            self.first = self.end = (end - _KEPT // 2) // self._size * self._size
            kept = torch.cat(self.waiting)[self.end - end :].clone()
            self.waiting, self.count = [kept], end - self.end
        elif len(self.waiting) > _PIECES:
            self.waiting = [torch.cat(self.waiting)]

    def take(self, count: int) -> torch.Tensor:
        """Return the first hidden states that wait; they are read."""
        whole = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
        self.waiting, self.count = [whole[count:]] if count < len(whole) else [], self.count - count
        self.end += count
        return whole[:count]


class Eagle:
    """The `Drafter` that is an EAGLE-3 head."""

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
        self._readers: dict[Sequence, HeadReading] = {}
        log.info("the EAGLE-3 head in %s drafts for the model in %s", head.folder, config.model)

    def read(self, chunks: Many[Chunk], hidden: torch.Tensor) -> None:
        """See `HiddenStatesReader`."""
        if not self._on_cpu:
            hidden = hidden[: sum(chunk.length for chunk in chunks)].clone()
        row = 0
        for chunk in chunks:
            reader = self._readers.get(chunk.sequence)
            if reader is None or reader.admission != chunk.admission:
                reader = self._readers[chunk.sequence] = HeadReading(chunk.admission, chunk.start, self._size)
            reader.keep(chunk.start, hidden[row : row + chunk.length])
            row += chunk.length

    def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
        """See `Drafter`. Reads positions whose hidden states wait and whose next token is known: others were computed
        for tokens of drafts that proved wrong, or the next one is under way."""
        drafts, places, most = [NOTHING] * len(sequences), list[int](), list[int]()
        step = HeadStep([], [], [], [], [], torch.empty(0))
        inputs: list[torch.Tensor] = []
        for index, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            reader = self._readers.get(sequence)
            if reader is None or reader.admission != sequence.admission:
                continue
            start, known = reader.end, len(sequence.tokens) - 1
            count = min(reader.count, known - start, _CATCH_UP)
            if count <= 0:
                continue
            places.append(index)
            most.append(limit if start + count == known else 0)
            inputs.append(reader.take(count))
            self._add(step, sequence, reader, start, count, most[-1])
        if places:
            step = step._replace(inputs=inputs[0] if len(inputs) == 1 else torch.cat(inputs))
            for index, found in zip(places, self._head.draft(step, most, least), strict=True):
                if found.tokens:
                    drafts[index] = Draft(found.tokens, list(map(class_of_probability, found.probabilities)))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._readers.pop(sequence, None)

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
