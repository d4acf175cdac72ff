"""A model's KV memory, as code that moves blocks between replicas sees it."""

import ctypes
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.embedded.kv.layout import Attends
from engine.errors import EngineFailure
from engine.kit.machine import host_memory
from engine.transfer.base import Region
from engine.transfer.shared_memory import shared_memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux since 5.14, which `mmap` does not have."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The memory of every group of layers. The first dimension of each tensor counts blocks, and a block is one
    contiguous range."""

    form: str
    """Name of the order of values within a block."""
    attends: Attends
    blocks: list[torch.Tensor]

    @property
    def dtype(self) -> str:
        return str(self.blocks[0].dtype).removeprefix("torch.")

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block, for each group."""
        return tuple(blocks[0].nbytes for blocks in self.blocks)

    @property
    def regions(self) -> list[Region]:
        """One region for each group."""
        return [region_of(blocks) for blocks in self.blocks]


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros on the host that other processes of this machine can be allowed to read. Pages take memory once
    they are written."""
    return torch.frombuffer(shared_memory(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def discard(tensor: torch.Tensor) -> None:
    """Give the whole pages of a tensor on the host back to the system. Its address stays; what is read there is zero,
    and pages take memory once they are written again."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    if size <= 0:
        return
    # The pages of shared memory are freed for all who have mapped it, which private memory refuses.
    for advice in (mmap.MADV_REMOVE, mmap.MADV_DONTNEED):
        if not _libc.madvise(start, size, advice):
            return
    code = ctypes.get_errno()
    raise EngineFailure(f"memory cannot be given back: {os.strerror(code)}")


def populate(address: int, size: int) -> None:
    """Give memory the pages that are about to be written, all at once: that takes two thirds of the time of a page
    fault for each. Does nothing where the system cannot."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(start, address + size - start, _POPULATE_WRITE)


def check_fits(asked_mb: int, cgroup: Path = Path("/sys/fs/cgroup")) -> None:
    """Raise EngineFailure if the machine or the container has less memory than is asked for: the system may promise
    more pages than there are."""
    if asked_mb > (present := host_memory(cgroup) >> 20):
        raise EngineFailure(f"KV_CACHE_MEMORY_MB={asked_mb} is more than the {present} MiB of memory here")


def region_of(tensor: torch.Tensor) -> Region:
    device = -1 if tensor.device.type == "cpu" else tensor.device.index or 0
    return Region(tensor.data_ptr(), tensor.nbytes, device)
