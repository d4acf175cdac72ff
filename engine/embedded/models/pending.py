"""Tokens that were sampled for the next step before the host has seen them."""

from collections.abc import Sequence as Sequence_

import torch

from engine.embedded.scheduler import Chunk


class PendingTokens:
    """What a model whose steps begin on the host keeps of them, by the sequence's slot."""

    def __init__(self) -> None:
        self._pending: dict[int, torch.Tensor] = {}

    def remember(self, slots: Sequence_[int], tokens: torch.Tensor) -> None:
        """The tokens, int64 [slots], that were sampled for the running sequences with these slots: they are pending at the next step."""
        self._pending.update(zip(slots, tokens, strict=True))

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, int64 [rows]; `logits` is what `forward` returned last, or a part of it."""
        return logits.argmax(dim=1)

    def tokens(self, chunk: Chunk) -> list[int]:
        """Those that a chunk computes."""
        sequence = chunk.sequence
        if chunk.start < len(sequence.tokens):
            return sequence.tokens[chunk.start : chunk.start + chunk.length]
        return [int(self._pending[sequence.slot])]
