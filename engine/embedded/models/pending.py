"""The tokens that were sampled last, for runners whose steps begin on the host."""

from collections.abc import Sequence

import torch

from engine.embedded.models.runner import StepInput


class PendingTokens:
    """The last sampled token of each slot, and the part of `ModelRunner` that has to do with them."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._sampled = torch.zeros(slots, dtype=torch.int64, device=device)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=1)

    def remember(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        self._sampled[torch.tensor(slots, device=self._sampled.device)] = tokens

    def token_ids(self, step: StepInput) -> list[int]:
        """Return the flat token ids of a step, pending ones filled in."""
        if min(step.tokens) >= 0:
            return step.tokens
        sampled = self._sampled.tolist()
        return [token if token >= 0 else sampled[-1 - token] for token in step.tokens]
