"""Encoded images in host memory, least recently used first out: an image that was seen before is not encoded again."""

from collections import OrderedDict
from typing import NamedTuple

from engine.media import ITEM_BYTES, EncodedMedia


class CacheStats(NamedTuple):
    """Counts since the start, and what is there now."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int
    utilisation: float
    """Part of the capacity in use; 0 of a cache that holds nothing."""


class EmbeddingCache:
    """Embeddings and their text by `multimodal/media/encoded_prompts.py: media_key`, of at most `capacity_bytes`; with
    0 nothing is ever found.

    `hidden_size` is that of the language model: embeddings are contiguous [rows, hidden size]. It belongs to one event
    loop.
    """

    def __init__(self, capacity_bytes: int, hidden_size: int) -> None:
        self._capacity = capacity_bytes
        self._hidden_size = hidden_size
        self._entries: OrderedDict[str, EncodedMedia] = OrderedDict()
        self._bytes = 0
        self._hits = self._misses = self._evictions = 0

    @property
    def stats(self) -> CacheStats:
        utilisation = self._bytes / self._capacity if self._capacity else 0.0
        return CacheStats(self._hits, self._misses, self._evictions, len(self._entries), self._bytes, utilisation)

    def get(self, key: str) -> EncodedMedia | None:
        """The image, which is then the most recently used one."""
        image = self._entries.get(key)
        if image is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return image

    def put(self, key: str, image: EncodedMedia) -> bool:
        """Keep the image, if it fits the cache at all: one that does not is refused, and evicts nothing.

        Returns whether it is kept. Raises ValueError for data that is no contiguous [rows, hidden size].
        """
        expected = image.rows * self._hidden_size * ITEM_BYTES[image.dtype]
        if len(image.data) != expected:
            raise ValueError(
                f"{image.rows} rows of {self._hidden_size} {image.dtype} are {expected} bytes, not {len(image.data)}"
            )
        size = _size(image)
        if size > self._capacity:
            return False
        if (old := self._entries.pop(key, None)) is not None:
            self._bytes -= _size(old)
        while self._bytes + size > self._capacity:
            self._bytes -= _size(self._entries.popitem(last=False)[1])
            self._evictions += 1
        self._entries[key] = image
        self._bytes += size
        return True


def _size(image: EncodedMedia) -> int:
    """Bytes of the embeddings and of the text."""
    return len(image.data) + len(image.text.encode())
