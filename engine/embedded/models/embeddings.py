"""A prompt's images inside the engine: which flat rows of a step take embeddings instead of those of their tokens."""

from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.kit.checks import ImageTokens
from engine.transfer.shared_bytes import readable
from engine.types import GenerateRequest

if TYPE_CHECKING:
    from engine.embedded.scheduler import Chunk

NO_IMAGES = "the KV blocks of the prompt are lost, and its images are not here to compute it again"


class PromptImages:
    """Where a prompt has its image tokens, and what takes their places: decoded when first needed, given back once computed."""

    def __init__(self, request: GenerateRequest, takes: ImageTokens) -> None:
        tokens = np.array(request.prompt_token_ids)
        self._images = request.spans
        self.places = [
            image.start + np.flatnonzero(tokens[image.start : image.start + image.length] == takes.token_id)
            for image in request.spans
        ]
        """The positions of each image's tokens."""
        self.positions: tuple[torch.Tensor, int] | None = None
        """For models with mRoPE: the prompt's positions, int64 [3, tokens], and what is added to those of later tokens."""
        self._hidden = takes.hidden_size
        self._end = int(self.places[-1][-1]) + 1
        self._decoded: dict[int, torch.Tensor] = {}

    def lost(self, start: int, length: int) -> bool:
        """Whether these tokens of the prompt need embeddings that are not here: the images came without, for their keys and values were
        to come from elsewhere."""
        return any(not self._images[index].data for index, _, _ in self._parts(start, length))

    def rows(
        self, start: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """For each image that these tokens are part of: the image tokens, counted from `start`, and [tokens, hidden] for them."""
        for index, first, last in self._parts(start, length):
            if index not in self._decoded:
                image = self._images[index]
                data = readable(image.data)
                stored = torch.frombuffer(
                    bytearray(data) if isinstance(data, bytes) else data, dtype=getattr(torch, image.dtype)
                )
                self._decoded[index] = stored.view(-1, self._hidden).to(device, dtype)
            yield (self.places[index][first:last] - start).tolist(), self._decoded[index][first:last]
        if start + length >= self._end:
            self._decoded.clear()

    def _parts(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """The images whose tokens are among these, and which of each."""
        if start < self._end:
            for index, places in enumerate(self.places):
                first, last = np.searchsorted(places, (start, start + length)).tolist()
                if first < last:
                    yield index, first, last


class ImageRows(NamedTuple):
    """The flat rows of a step that are images' tokens, and their embeddings, [rows, hidden size]."""

    rows: list[int]
    embeddings: torch.Tensor


def image_rows(chunks: "Sequence_[Chunk]", dtype: torch.dtype, device: torch.device) -> ImageRows | None:
    """None for a step without image tokens, as most are."""
    rows: list[int] = []
    parts: list[torch.Tensor] = []
    row = 0
    for chunk in chunks:
        if chunk.sequence.images is not None:
            for places, embeddings in chunk.sequence.images.rows(chunk.start, chunk.length, dtype, device):
                rows += [row + place for place in places]
                parts.append(embeddings)
        row += chunk.length
    return ImageRows(rows, torch.cat(parts)) if parts else None


def lost_chunks(chunks: "Sequence_[Chunk]") -> "list[Chunk]":
    """Those that cannot be computed for want of embeddings."""
    return [
        chunk
        for chunk in chunks
        if (images := chunk.sequence.images) is not None and images.lost(chunk.start, chunk.length)
    ]
