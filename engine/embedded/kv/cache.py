"""The KV cache that the torch and CUDA runners share: keys and values of a group's blocks, block-major."""

import math
import mmap

import torch


class KvCache:
    """Keys and values of a group's blocks, block-major: `data` has the shape [blocks, layers, 2, block_size,
    kv_heads, head_dim], so that all layers of a block are one contiguous range."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        _, self.layers, _, self.block_size, heads, head_dim = data.shape
        self.heads = heads
        self.head_dim = head_dim
        self.token_rows = data.view(-1, heads * head_dim)
        """[blocks * layers * 2 * block_size, heads * head_dim]"""
        self.block_rows = data.view(-1, self.block_size * heads * head_dim)
        """[blocks * layers * 2, block_size * heads * head_dim]"""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory for a cache: zeros, since attention multiplies what lies behind a sequence's end by zero, and NaN
    would survive that.

    On a CPU they are anonymous pages, which take memory only once a block is written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
