"""Images of a prompt inside the engine: their embeddings, which take the places of the embeddings of image tokens."""

from collections.abc import Iterator

import numpy as np
import torch

from engine.kit.checks import ImageTokens
from engine.transfer.shared_bytes import readable
from engine.types import GenerateRequest

NO_IMAGES = "the KV blocks of the prompt are lost, and its images are not here to compute it again"


class PromptImages:
    """Places of a prompt's image tokens, and their embeddings: decoded when first needed, dropped once they have
    been computed."""

    def __init__(self, request: GenerateRequest, takes: ImageTokens) -> None:
        tokens = np.array(request.prompt_token_ids)
        self._images = request.spans
        self._takes = takes
        self._num_tokens = len(tokens)
        self.places = [
            image.start + np.flatnonzero(tokens[image.start : image.start + image.length] == takes.of(image))
            for image in request.spans
        ]
        """Positions of each image's tokens."""
        self._end = int(self.places[-1][-1]) + 1
        self._decoded: dict[int, torch.Tensor] = {}
        self._rope: torch.Tensor | None = None

    @property
    def uses_mrope(self) -> bool:
        """Whether positions depend on the grids of images."""
        return bool(self._takes.merge)

    def missing(self, start: int, length: int) -> bool:
        """Return whether these tokens of the prompt need embeddings that are not here: the request came without
        them, since keys and values were to come from another replica."""
        return any(not self._images[index].data for index, _, _ in self._parts(start, length))

    def rows(
        self, start: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield the image tokens, counted from `start`, and their embeddings [tokens, hidden], of each image with
        tokens among these."""
        for index, first, last in self._parts(start, length):
            if index not in self._decoded:
                image = self._images[index]
                data = readable(image.data)
                stored = torch.frombuffer(
                    bytearray(data) if isinstance(data, bytes) else data, dtype=getattr(torch, image.dtype)
                )
                self._decoded[index] = stored.view(-1, self._takes.hidden_size).to(device, dtype)
            yield (self.places[index][first:last] - start).tolist(), self._decoded[index][first:last]
        if start + length >= self._end:
            self._decoded.clear()

    def rope_positions(self, start: int, length: int) -> torch.Tensor:
        """Return the positions of these tokens in time, height and width, int64 [3, length]. Output follows its
        prompt in all three."""
        if self._rope is None:
            self._rope = self._prompt_positions()
        end = start + length
        first = max(start, self._num_tokens)
        after = int(self._rope.max()) + 1 - self._num_tokens
        output = torch.arange(first, max(first, end)).expand(3, -1) + after
        return torch.cat((self._rope[:, start:end], output), 1)

    def _prompt_positions(self) -> torch.Tensor:
        """Positions of the prompt as Qwen2-VL defines them (arXiv 2409.12191, section 2.1): text advances in all
        three dimensions, the tokens of an image or video count the cells of its grid, in time by its interval, and
        what follows goes on behind its longer side."""
        positions = np.empty((3, self._num_tokens), np.int64)
        row = position = 0
        for places, image in zip(self.places, self._images, strict=True):
            time, height, width = image.grid
            height //= self._takes.merge
            width //= self._takes.merge
            first, last = int(places[0]), int(places[-1]) + 1
            positions[:, row:first] = np.arange(position, position + first - row)
            position += first - row
            cells = np.indices((time, height, width)).reshape(3, -1)
            cells[0] = cells[0] * np.float32(image.interval)
            positions[:, first:last] = position + cells
            position += max(height, width)
            row = last
        positions[:, row:] = np.arange(position, position + self._num_tokens - row)
        return torch.from_numpy(positions)

    def _parts(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each image with tokens among these, and which of its tokens: from the first to before
        the last."""
        if start < self._end:
            for index, places in enumerate(self.places):
                first, last = np.searchsorted(places, (start, start + length)).tolist()
                if first < last:
                    yield index, first, last
