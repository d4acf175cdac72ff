"""Adapts our logits processors to TensorRT-LLM, which pickles them and calls them in its worker processes."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from engine.kit.logits import Factory, LogitsProcessor

log = logging.getLogger(__name__)


class ProcessorAdapter:
    """Runs one request's processors in order, for one sequence with one beam. On errors, logits stay unchanged.

    It can be pickled if its factories can, as module-level classes and functions can.
    """

    def __init__(self, factories: Sequence[Factory]) -> None:
        self._factories = tuple(factories)
        self._processors: list[LogitsProcessor] | None = None

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None:
        """Change `logits` [beam, 1, vocab] in place. `token_ids` has a list for each beam, prompt included."""
        try:
            if logits.shape[0] != 1 or len(token_ids) != 1:
                raise ValueError(f"logits processors take one beam, not {logits.shape[0]}")
            with _stream(stream_ptr):
                row = logits.view(-1)
                row.copy_(self._processed(token_ids[0], row))
        except Exception:  # third-party code on an engine thread must not stop the engine
            log.exception("a logits processor failed on request %s and had no effect", req_id)

    def _processed(self, token_ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        if self._processors is None:
            self._processors = [factory() for factory in self._factories]
        copy = row.float()
        copy = copy.clone() if copy is row else copy
        for processor in self._processors:
            processor(token_ids, copy)
        if copy.isnan().any():
            raise ValueError("it wrote NaN")
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"_factories": self._factories, "_processors": None}


class BadSequences:
    """Prevents token sequences: masks the last token of each when the others precede it."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._sequences = tuple(sequences)

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        for *start, last in self._sequences:
            if list(token_ids[-len(start) :]) == start:
                logits[last] = -torch.inf


def _stream(pointer: int | None) -> contextlib.AbstractContextManager[Any]:
    """Use the engine's CUDA stream, so that the change is ordered before its next operation."""
    return contextlib.nullcontext() if pointer is None else torch.cuda.stream(torch.cuda.ExternalStream(pointer))  # type: ignore[no-untyped-call]
