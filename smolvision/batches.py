"""Batches of chats, made by worker processes while the model trains."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from smolvision.conversations import FIRST_TRAINING_SEED, IMAGE_TOKEN_ID, IMAGE_TOKENS, Encoder, make_chat
from smolvision.images import GRID, LABELS, SIZE, patch_labels, render


class Batch(NamedTuple):
    """`images` are those of all chats, in order."""

    ids: torch.Tensor
    """int64 [chats, length], filled up with zeros."""
    said: torch.Tensor
    """bool [chats, length]: the ids that the model has to say."""
    images: torch.Tensor
    """uint8 [images, 256, 256, 3]."""
    patches: torch.Tensor
    """uint8 [images, 8, 64]: images.LABELS."""

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


class Chats(IterableDataset[Batch]):
    """Endless batches; each worker has seeds of its own."""

    def __init__(self, tokenizer: Path, seed: int, size: int, turns: int, length: int) -> None:
        super().__init__()
        self._tokenizer, self._seed, self._size, self._turns, self._length = tokenizer, seed, size, turns, length

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        encoder = Encoder(Tokenizer.from_file(str(self._tokenizer)))
        seed = FIRST_TRAINING_SEED + self._seed * 10**10 + worker
        while True:
            seeds = range(seed, seed + self._size * workers, workers)
            batch = self._batch(encoder, seeds)
            if len(batch.images):  # the tower takes no less than one
                yield batch
            seed = seeds.stop

    def _batch(self, encoder: Encoder, seeds: range) -> Batch:
        ids = np.zeros((self._size, self._length), np.int64)
        said = np.zeros((self._size, self._length), bool)
        pictures, patches = [], []
        for row, seed in enumerate(seeds):
            chat = make_chat(seed, self._turns)
            tokens, spoken = encoder(chat, self._length)
            ids[row, : len(tokens)], said[row, : len(tokens)] = tokens, spoken
            for scene in chat.scenes[: tokens.count(IMAGE_TOKEN_ID) // IMAGE_TOKENS]:
                pictures.append(render(scene, Random(seed + len(pictures))))
                patches.append(patch_labels(scene))
        images = np.array(pictures, np.uint8).reshape(-1, SIZE, SIZE, 3)
        labels = np.array(patches, np.uint8).reshape(-1, len(LABELS), GRID * GRID)
        return Batch(*(torch.from_numpy(array) for array in (ids, said, images, labels)))


def loader(chats: Chats, workers: int, pin: bool) -> Iterator[Batch]:
    """Batches from worker processes, or from this one if there are none."""
    more = {"multiprocessing_context": "spawn", "prefetch_factor": 4} if workers else {}
    return iter(DataLoader(chats, batch_size=None, num_workers=workers, pin_memory=pin, **more))
