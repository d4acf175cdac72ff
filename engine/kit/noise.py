"""Random numbers for requests with a seed, the same in every engine that uses them."""

import numpy as np
from numpy.typing import NDArray

_PHILOX_KEY = (1 << 64) - 1


def exponentials(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """Return the exponential variates of the ids below `count`, float32 [count], for a seed, of which 64 bits count,
    and a position: those of Philox 4x32-10 with the key seed and the counter (id / 4, position, 0, 0).

    A GPU's kernels compute the same, except for the last bits of logarithms.
    """
    words = _philox(seed & _PHILOX_KEY, position, -(-count // 4)).reshape(-1)[:count]
    part = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    found: NDArray[np.float32] = -np.log1p(-np.minimum(part, np.float32(1 - 2.0**-24)))
    return found


def _philox(key: int, position: int, groups: int) -> NDArray[np.uint64]:
    """Return uint64 [groups, 4] with 32 random bits each (Salmon et al., Parallel random numbers: as easy as 1, 2,
    3)."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    counters = [np.arange(groups, dtype=np.uint64), np.full(groups, position, dtype=np.uint64)]
    a, b = counters
    c = d = np.zeros(groups, dtype=np.uint64)
    for round_ in range(10):
        left = a * np.uint64(0xD2511F53)
        right = c * np.uint64(0xCD9E8D57)
        first = np.uint64((key + round_ * 0x9E3779B9) & 0xFFFFFFFF)
        second = np.uint64(((key >> 32) + round_ * 0xBB67AE85) & 0xFFFFFFFF)
        a, b, c, d = (right >> shift) ^ b ^ first, right & low, (left >> shift) ^ d ^ second, left & low
    return np.stack((a, b, c, d), axis=1)
