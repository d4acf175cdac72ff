"""Staging memory and CUDA graphs, which make a vision tower fast on a GPU."""

import logging
from collections.abc import Callable

import torch

from engine.embedded.models.cuda.graphs import capture

_MOST_GRAPHS = 16

log = logging.getLogger(__name__)


class Staging:
    """Pinned host memory that is used again and again: allocating fresh pages takes longer than copying the values."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor. It overwrites the one before."""
        size = shape.numel() * dtype.itemsize
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._memory[:size].view(dtype).view(shape)


class Graphs:
    """Runs `compute`, pixels to embeddings, with a CUDA graph for each shape of pixels.

    Launching a tower's hundreds of kernels from Python takes longer than the GPU takes to compute a few images.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._most = _MOST_GRAPHS

    def __len__(self) -> int:
        """Number of shapes that have a graph."""
        return len(self._graphs)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return embeddings that are valid until the next call."""
        shape = pixels.shape
        if shape not in self._graphs and len(self._graphs) < self._most:
            try:
                self._capture(pixels)
            except torch.OutOfMemoryError:
                log.warning("there is too little memory for another CUDA graph of the vision tower")
                self._most = len(self._graphs)
            except RuntimeError as error:  # the tower does something that cannot be captured
                log.info("the vision tower runs without CUDA graphs: %s", error)
                self._most = 0
        if shape not in self._graphs:
            return self._compute(pixels)
        graph, inputs, outputs = self._graphs[shape]
        inputs.copy_(pixels)
        graph.replay()
        return outputs

    def _capture(self, pixels: torch.Tensor) -> None:
        inputs = pixels.clone()
        pool = next((known.pool() for known, _, _ in self._graphs.values()), None)
        graph, outputs = capture(lambda: self._compute(inputs), pool)
        self._graphs[pixels.shape] = graph, inputs, outputs
