"""A cache of encoded media in host memory. The least recently used are evicted first."""

from collections import OrderedDict
from typing import NamedTuple

from engine.media import ITEM_BYTES, EncodedMedia


class CacheStats(NamedTuple):
    """Counters since the start, and the current contents."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int
    utilisation: float
    """Fraction of the capacity in use; 0 for a cache without capacity."""


class EmbeddingCache:
    """Encoded media by key (`prompts.py: media_key`), at most `capacity_bytes`. A capacity of 0 keeps nothing.

    Of embeddings that stay with an encode replica only the location is here, and they may have gone there.
    Embeddings must be contiguous [rows, hidden size]; `hidden_size` is that of the language model. Use the cache on one
    event loop.
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
        """Return the media for `key`, which become the most recently used, or None."""
        image = self._entries.get(key)
        if image is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return image

    def peek(self, key: str) -> EncodedMedia | None:
        """Return the media for `key`, or None; this is no use of them."""
        return self._entries.get(key)

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0

    def drop(self, key: str) -> None:
        """Forget the media for `key`, if they are here."""
        if (image := self._entries.pop(key, None)) is not None:
            self._bytes -= _size(image)

    def put(self, key: str, image: EncodedMedia) -> bool:
        """Keep media and return True; media larger than the cache are not kept, and evict nothing.

        Raises ValueError for data that are not contiguous [rows, hidden size].
        """
        expected = image.rows * self._hidden_size * ITEM_BYTES[image.dtype]
        if image.size != expected:
            raise ValueError(
                f"{image.rows} rows of {self._hidden_size} {image.dtype} are {expected} bytes, not {image.size}"
            )
        size = _size(image)
        if size > self._capacity:
            return False
        self.drop(key)
        while self._bytes + size > self._capacity:
            self._bytes -= _size(self._entries.popitem(last=False)[1])
            self._evictions += 1
        self._entries[key] = image
        self._bytes += size
        return True


def _size(image: EncodedMedia) -> int:
    """Return the bytes of the embeddings that are here, and of the text."""
    return len(image.data) + len(image.text.encode())
