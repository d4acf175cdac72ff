"""Keys that name whole prefixes of prompts, to know which replica has computed them.

A block's key is made of its tokens, what it holds of images, and the key of the block before. Keys are Python's hashes:
64 bits that are unpredictable outside the process. Two prefixes with the same key would mislead the choice of a
replica, and nothing else.
"""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import repeat


def root_key(cache_salt: str = "", lora: str = "") -> int:
    """The key before the first block of prompts that share blocks with each other."""
    return hash(("root", cache_salt, lora))


def block_keys(
    tokens: Sequence[int], block_size: int, parent: int, media: Iterable[Hashable] = repeat(None)
) -> Iterator[int]:
    """Keys of the whole blocks of `tokens`, made as they are asked for.

    `parent` is the key of the block before them, or `root_key`; `media` says for each block what it holds of images.
    """
    data, key = array("q", tokens), parent
    for start, shown in zip(range(0, len(data) - block_size + 1, block_size), media, strict=False):
        key = hash((key, data[start : start + block_size].tobytes(), shown))
        yield key
