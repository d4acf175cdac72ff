"""EAGLE-3 heads of random weights, as the GPU's kernels compute them and as torch does."""

import random

import torch

from engine.checkpoints.eagle import EagleHead
from engine.embedded.models.cuda.head import CudaHead
from engine.embedded.models.heads import HeadDraft, HeadStep
from engine.embedded.models.torch.head import TorchHead
from tests.support.head_files import HIDDEN, VOCAB

BLOCK, BLOCKS, MOST = 4, 40, 6


class Both:
    """The same head twice, and sequences that both read."""

    def __init__(
        self, head: EagleHead, *, graphs: bool = True, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self._device = device
        self._rng, self._generator = random.Random(4), torch.Generator().manual_seed(4)
        weights = torch.randn((VOCAB, HIDDEN), generator=self._generator).to(device, dtype)

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            return weights[tokens]

        self._plain = TorchHead(head, embed, weights, BLOCKS, BLOCK)
        sizes = {"positions": 64, "most_tokens": MOST, "batch": 5, "graphs": graphs}
        self._fast = CudaHead(head, weights, weights, blocks=BLOCKS, block_size=BLOCK, **sizes)
        self.ends = [0] * 5
        """Number of positions of each sequence that have been read."""
        self.skipped = [0] * 5
        """Number of blocks before the first of its table."""

    def draft(self, asked: list[tuple[int, int, int]], least: float = 0.0) -> list[tuple[HeadDraft, HeadDraft]]:
        """Read and draft: sequences, how many positions of each, and limits. Return what each found, plain operations
        first."""
        count = sum(length for _, length, _ in asked)
        limits = [limit for _, _, limit in asked]
        inputs = torch.randn((count, 3 * HIDDEN), generator=self._generator).to(self._device)
        step = HeadStep([], [], [], [], [], inputs)
        for index, length, limit in asked:
            start = self.ends[index]
            self.ends[index] += length
            step.tokens.extend(self._rng.randrange(VOCAB) for _ in range(length))
            step.positions.extend(range(start, start + length))
            step.starts.append(start - self.skipped[index] * BLOCK)
            step.lengths.append(length)
            held = -(-(step.starts[-1] + length + limit) // BLOCK)
            step.tables.append([8 * index + block for block in range(held)])
        expected, found = self._plain.draft(step, limits, least), self._fast.draft(step, limits, least)
        return list(zip(expected, found, strict=True))
