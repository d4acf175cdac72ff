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
_LEAST = 0.2
"""A draft ends where it is less likely right than this."""


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
        self.last: tuple[int, float, torch.Tensor] | None = None
        """The head's prediction at the position before `end`: token, probability and hidden state."""

    def keep(self, start: int, hidden: torch.Tensor) -> None:
        """Take hidden states of the positions from `start` on. Those that were there are of other tokens."""
        if not self.end <= start <= self.end + self.count:
            self.first = min(start, self.first) if start < self.end else start
            self.end, self.waiting, self.last = start, [], None
        elif start < self.end + self.count:
            self.waiting = [torch.cat(self.waiting)[: start - self.end]]
        self.waiting.append(hidden)
        self.count = start - self.end + len(hidden)
        if self.count > _KEPT:
            end = self.end + self.count
            self.first = self.end = (end - _KEPT // 2) // self._size * self._size
            kept = torch.cat(self.waiting)[self.end - end :].clone()
            self.waiting, self.count, self.last = [kept], end - self.end, None
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

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[Draft]:
        """See `Drafter`."""
        self._catch_up(sequences)
        drafts = [Draft([], []) for _ in sequences]
        ahead: dict[int, torch.Tensor] = {}
        sure = [0.0] * len(sequences)
        """Probability that all of a draft is right, as the head sees it."""
        for index, sequence in enumerate(sequences):
            reader = self._readers.get(sequence)
            if reader is not None and reader.last is not None and reader.end == len(sequence.tokens) - 1:
                token, sure[index], hidden = reader.last
                _add(drafts[index], token, sure[index])
                if limits[index] > 1 and sure[index] > _LEAST:
                    ahead[index] = hidden
        while ahead:
            places = [(sequences[i], len(sequences[i].tokens) - 2 + len(drafts[i].tokens)) for i in ahead]
            tokens, hidden = [[drafts[i].tokens[-1]] for i in ahead], torch.stack(list(ahead.values()))
            found = self._head.forward(self._step(places, tokens, hidden, drafted=True))
            following = {}
            for row, index in enumerate(ahead):
                _add(drafts[index], found.tokens[row], found.probabilities[row])
                sure[index] *= found.probabilities[row]
                if len(drafts[index].tokens) < limits[index] and sure[index] > _LEAST:
                    following[index] = found.hidden[row]
            ahead = following
        return [draft if draft.tokens else NOTHING for draft in drafts]

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._readers.pop(sequence, None)

    def _catch_up(self, sequences: Many[Sequence]) -> None:
        """Read positions whose hidden states wait and whose next token is known: others were computed for tokens of
        drafts that proved wrong, or the next one is under way."""
        places: list[tuple[Sequence, int]] = []
        tokens: list[list[int]] = []
        inputs: list[torch.Tensor] = []
        for sequence in sequences:
            reader = self._readers.get(sequence)
            if reader is None or reader.admission != sequence.admission:
                continue
            count = min(reader.count, len(sequence.tokens) - 1 - reader.end, _CATCH_UP)
            if count > 0:
                places.append((sequence, reader.end))
                tokens.append(sequence.tokens[reader.end + 1 : reader.end + 1 + count])
                inputs.append(reader.take(count))
        if not places:
            return
        found = self._head.forward(self._step(places, tokens, torch.cat(inputs), drafted=False))
        for row, (sequence, _) in enumerate(places):
            self._readers[sequence].last = found.tokens[row], found.probabilities[row], found.hidden[row]

    def _step(
        self, places: Many[tuple[Sequence, int]], tokens: list[list[int]], inputs: torch.Tensor, *, drafted: bool
    ) -> HeadStep:
        """Return the step of positions from a place on, of some sequences. Tables begin with the block of the first
        position that the head has read."""
        starts, tables = [], []
        for (sequence, place), following in zip(places, tokens, strict=True):
            skipped = self._readers[sequence].first // self._size
            table = sequence.tables[0][skipped:]
            lacking = -(-(place + len(following)) // self._size) - skipped - len(table)
            own = self._blocks + sequence.slot * self._spare
            starts.append(place - skipped * self._size)
            tables.append([*table, *range(own, own + lacking)])
        return HeadStep(
            tokens=[token for following in tokens for token in following],
            positions=[
                position
                for (_, place), following in zip(places, tokens, strict=True)
                for position in range(place, place + len(following))
            ],
            starts=starts,
            lengths=list(map(len, tokens)),
            tables=tables,
            inputs=inputs,
            own=drafted,
        )


def _add(draft: Draft, token: int, probability: float) -> None:
    draft.tokens.append(token)
    draft.classes.append(class_of_probability(probability))
