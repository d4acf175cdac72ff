"""EAGLE-3 heads as computed beside the model that they draft for."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from safetensors import safe_open

from engine.checkpoints.eagle import EagleHead
from engine.checkpoints.headers import read_headers
from engine.embedded.models.rotary import Rotary, rotary_of
from engine.errors import EngineFailure

MOST_READ = 1024
"""About the most positions that are read in a step; fewer of each sequence, the more there are."""
ROUND_DRAFTS = 3
"""Number of tokens that are drafted for each sequence in a round of `DraftRounds`."""
ROUND_TOKENS = ROUND_DRAFTS + 1
"""Number of tokens of each sequence that the target computes in a round."""
MOST_ROUNDS = 8
"""Maximum number of rounds that run one after another."""
_LEAST_READ = 8
"""Number of positions of each sequence that may be read in a step, however many sequences there are."""


def most_read(sequences: int) -> int:
    """Return how many positions of each of some sequences a step reads at most."""
    return max(MOST_READ // sequences, _LEAST_READ)


class HeadStep(NamedTuple):
    """Consecutive positions of some sequences. Flat lists have an entry for each position."""

    tokens: list[int]
    """Flat: the token that follows each position."""
    positions: list[int]
    starts: list[int]
    """Index of each sequence's first position in its table."""
    lengths: list[int]
    tables: list[list[int]]
    """Blocks of the head's own KV cache, which are numbered as the target's; further ones are for drafts."""
    inputs: torch.Tensor
    """Flat: the target's hidden states [positions, layers * hidden]."""


class HeadDraft(NamedTuple):
    """Tokens that the head expects behind the last position of a sequence, as ids of the target."""

    tokens: list[int]
    probabilities: list[float]


class RoundStart(NamedTuple):
    """A sequence from which rounds go on."""

    slot: int
    admission: int
    position: int
    """The position of its last token."""
    token: int
    skipped: int
    """The position at which its table of the head begins."""


class DraftRounds(Protocol):
    """Rounds of a draft and its verification that run one after another on the device, without the host.

    In a round the target computes a sequence's last token and the `ROUND_DRAFTS` behind it that the head expects, and
    draws a token behind each. Those for which it drew what was drafted are right, and so is the one behind them.
    """

    most_sequences: int

    def goes_on(self, starts: Sequence[RoundStart]) -> bool:
        """Return whether the last rounds were of the same sequences, and have drafted behind the tokens they have."""
        ...

    def run(self, starts: Sequence[RoundStart], step: HeadStep, rounds: int) -> torch.Tensor:
        """Run rounds of sequences whose blocks the target knows, and return what comes of them without waiting: int32
        [rounds, sequences, 1 + ROUND_TOKENS], how many tokens came of a round, and the tokens drawn in it, of which so
        many count. The next run writes to the same memory.

        `step` has the sequences' tables, with room for all that is drafted, and, unless these rounds go on behind the
        last ones, what the head has yet to read of each sequence.
        """
        ...

    def note_taken(self, starts: Sequence[RoundStart]) -> None:
        """Note where those sequences of the last rounds are that go on."""
        ...


class HeadRunner(Protocol):
    """A loaded head with a KV cache of its own: a layer for every block of the target's, and some spare ones."""

    rounds: DraftRounds | None
    """None where the device has the host between a draft and its verification."""

    def draft(self, step: HeadStep, limits: Sequence[int], least: float) -> list[HeadDraft]:
        """Read positions, then draft at most `limits[i]` tokens of each sequence, and none behind those that are all
        right with a probability of at most `least`. Drafted positions are in the sequence's table."""
        ...


def load_tensors(head: EagleHead) -> dict[str, torch.Tensor]:
    """Read a head's tensors by their plain names. Raises EngineFailure for values that are not finite, and for tokens
    that the target does not have."""
    stored, found = read_headers(head.folder), {}
    for plain, name in head.names.items():
        with safe_open(stored[name].path, framework="pt") as file:
            found[plain] = file.get_tensor(name)
        if not found[plain].isfinite().all():
            raise EngineFailure(f"the tensor {name} in {stored[name].path} has values that are not finite")
    places = torch.arange(head.draft_vocab_size)
    found["d2t"] = drafted = places + found["d2t"].long() if "d2t" in found else places
    if not 0 <= int(drafted.min()) <= int(drafted.max()) < head.facts.vocab_size:
        raise EngineFailure(f"d2t in {stored[head.names['d2t']].path} names tokens that the model does not have")
    return found


def head_rotary(head: EagleHead) -> Rotary:
    """Return a head's rotary positions. Raises EngineFailure if it scales them in an unknown way."""
    found = rotary_of(head.facts)
    if found is None:
        raise EngineFailure(f"the scaled rotary positions in {head.folder} are unknown")
    return found


def likeliest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the likeliest of each row, and its probability."""
    best = logits.float().log_softmax(-1).max(-1)
    return best.indices.tolist(), best.values.exp().tolist()


def places_of(step: HeadStep) -> list[int]:
    """Return for each flat position its place in the sequence's table."""
    return [
        place for start, length in zip(step.starts, step.lengths, strict=True) for place in range(start, start + length)
    ]
