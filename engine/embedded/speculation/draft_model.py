"""A small model of the same tokenizer drafts for the large one.

It has a KV cache of its own, in which a sequence keeps its blocks until it ends. What it wrote for drafted tokens that
proved wrong is written over.
"""

import itertools
import json
import logging
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import EmbeddedConfig
from engine.embedded.kv.blocks import BlockPool
from engine.embedded.models.load import load_runner
from engine.embedded.models.runner import ModelRunner, StepInput
from engine.embedded.sequence import Sequence
from engine.embedded.speculation.drafter import NOTHING, Draft, class_of_probability
from engine.errors import EngineFailure

log = logging.getLogger(__name__)

_CATCH_UP = 64
"""Maximum number of tokens of a sequence that are computed in one step before it is drafted for: a prompt is read bit
by bit."""
_CONTEXT = 4096
"""Tokens for each place of the batch that the draft model's KV cache has room for, if the context is longer."""


class _Drafted:
    """The draft model's KV cache of a sequence."""

    def __init__(self, admission: int) -> None:
        self.admission = admission
        self.tokens: list[int] = []
        """Tokens that have keys and values, drafted ones included."""
        self.table: list[int] = []


class DraftModel:
    """The `Drafter` that is a model."""

    free = False

    def __init__(self, config: EmbeddedConfig, target: ModelRunner) -> None:
        """Load the model. Raises EngineFailure if that fails, or if its tokens are not those of the target."""
        folder = config.speculative_model
        _check_tokenizers(Path(config.model), Path(folder))
        context = min(target.context_length, _CONTEXT)
        own = msgspec.structs.replace(
            config,
            model=folder,
            max_seq_len=0,
            num_blocks=config.max_batch_size * -(-context // config.kv_block_size),
            kv_transfer="",
            kv_cache_dtype="auto",
            compressed_weights="off" if config.compressed_weights == "off" else "auto",
            speculative="none",
            enable_chunked_prefill=False,  # its steps have any number of tokens, from the first on
        )
        self.runner = load_runner(own)
        if len(self.runner.groups) != 1 or self.runner.groups[0].window is not None:
            raise EngineFailure(f"SPECULATIVE_MODEL: the model in {folder} has sliding windows; a draft model has none")
        self._pool = BlockPool(self.runner.groups[0].num_blocks, config.kv_block_size, reuse=False, publish=_ignore)
        self._known = min(target.vocab_size, self.runner.vocab_size)
        self._readers: dict[Sequence, _Drafted] = {}
        self._admissions = itertools.count(1)
        log.info("the model in %s drafts for the one in %s", folder, config.model)

    @property
    def used_blocks(self) -> int:
        """Number of KV blocks that sequences have."""
        return self._pool.used

    def draft(self, sequences: Many[Sequence], limits: Many[int], least: float = 0.0) -> list[Draft]:
        """See `Drafter`."""
        drafts = [Draft([], []) for _ in sequences]
        sure = [1.0] * len(sequences)
        fresh: dict[int, list[int]] = {}
        for index, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            reader = self._readers.setdefault(sequence, _Drafted(next(self._admissions)))
            right = _common(reader.tokens, sequence.tokens)
            del reader.tokens[right:]
            new = sequence.tokens[right : right + _CATCH_UP]
            if max(new) < self.runner.vocab_size and self._make_room(reader, right + len(new) + limit):
                fresh[index] = new
        while fresh:
            found = self._compute(sequences, fresh)
            following: dict[int, list[int]] = {}
            for (index, _), token, value in zip(sorted(fresh.items(), key=_by_length), *found, strict=True):
                sequence, reader, draft = sequences[index], self._readers[sequences[index]], drafts[index]
                if len(reader.tokens) < len(sequence.tokens) or token >= self._known:
                    continue
                draft.tokens.append(token)
                draft.classes.append(class_of_probability(value))
                sure[index] *= value
                if len(draft.tokens) < limits[index] and sure[index] > least:
                    following[index] = [token]
            fresh = following
        return [draft if draft.tokens else NOTHING for draft in drafts]

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        if (reader := self._readers.pop(sequence, None)) is not None:
            self._pool.release(reader.table)

    def _make_room(self, reader: _Drafted, end: int) -> bool:
        """Give a sequence blocks up to a position; return whether there are enough, and the model reads as far."""
        missing = -(-end // self._pool.block_size) - len(reader.table)
        if end > self.runner.context_length or missing > self._pool.available:
            return False
        if missing > 0:
            reader.table += self._pool.allocate(missing)
        return True

    def _compute(self, sequences: Many[Sequence], fresh: dict[int, list[int]]) -> tuple[list[int], list[float]]:
        """Compute new tokens of sequences; return the model's most likely next tokens and their probabilities, in order
        of the number of new tokens: those of one come first."""
        ordered = sorted(fresh.items(), key=_by_length)
        readers = [self._readers[sequences[index]] for index, _ in ordered]
        starts = [len(reader.tokens) for reader in readers]
        lengths = [len(tokens) for _, tokens in ordered]
        step = StepInput(
            tokens=[token for _, tokens in ordered for token in tokens],
            positions=[
                position
                for start, length in zip(starts, lengths, strict=True)
                for position in range(start, start + length)
            ],
            starts=starts,
            lengths=lengths,
            slots=[sequences[index].slot for index, _ in ordered],
            admissions=[reader.admission for reader in readers],
            tables=[[reader.table] for reader in readers],
            sampled=[0] * len(ordered),
            rows=[end - 1 for end in itertools.accumulate(lengths)],
        )
        with torch.inference_mode():
            best = self.runner.forward(step).float().softmax(1).max(1)
        for reader, (_, new) in zip(readers, ordered, strict=True):
            reader.tokens += new
        return best.indices.tolist(), best.values.tolist()


def _by_length(item: tuple[int, list[int]]) -> int:
    return len(item[1])


def _common(first: Many[int], second: Many[int]) -> int:
    """Return the length of the common beginning, without the last of `second`: its logits are wanted again."""
    most = min(len(first), len(second) - 1)
    if first[:most] == second[:most]:
        return most
    return next(index for index in range(most) if first[index] != second[index])


def _ignore(_: object) -> None:
    pass


def _check_tokenizers(target: Path, draft: Path) -> None:
    """Raise EngineFailure unless two models have the same tokens."""
    ours, theirs = _tokens(target), _tokens(draft)
    if ours == theirs:
        return
    different = sum(ours.get(text) != theirs.get(text) for text in ours.keys() | theirs.keys())
    raise EngineFailure(
        f"SPECULATIVE_MODEL: the tokenizer in {draft} is not that in {target}: {different} tokens differ. A draft "
        "model has the tokenizer of the model that it drafts for"
    )


def _tokens(folder: Path) -> dict[str, int]:
    """Return the tokens of the model in a folder; none without a tokenizer. Raises EngineFailure."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        vocabulary = found["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a Unigram model: texts with their scores
            vocabulary = {text: index for index, (text, _) in enumerate(vocabulary)}
        return {**vocabulary, **{entry["content"]: entry["id"] for entry in found.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineFailure(f"cannot read {path}: {error}") from error
