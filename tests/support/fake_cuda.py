"""A stand-in for the calls of the CUDA runtime that transfers make: the memory of its GPU is the host's, in memfds."""

import contextlib
import ctypes
import mmap
import os
import struct
import time
from collections.abc import Iterator
from weakref import finalize

from engine.transfer import arena, cuda_ipc
from engine.transfer.base import TransferError
from engine.transfer.cuda import HANDLE_BYTES
from engine.transfer.shared_memory import MemfdMapping, make_memory

_HANDLE = struct.Struct("<qq")
PIECE = 1 << 20
SPEED = 64 << 20
"""Bytes per second that are copied: a test has time to do something meanwhile."""

_allocated: dict[int, tuple[int, int]] = {}
"""The descriptor and the size of each allocation, by address."""
_opened: dict[int, tuple[MemfdMapping, int]] = {}
"""Allocations of other processes that are open, and their sizes, by address."""
pinned: dict[int, mmap.mmap] = {}
"""Pinned memory of the host, by address."""


def allocate(size: int) -> mmap.mmap:
    """Return memory of the GPU, which is freed with the object."""
    fd = make_memory(size)
    memory = mmap.mmap(fd, size)
    address = _address(memory)
    _allocated[address] = fd, size
    finalize(memory, _free, address)
    return memory


class FakeCuda:
    """`engine.transfer.cuda.Cuda`, with one GPU. A copy has ended when the call returns."""

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        assert device == 0
        yield

    def export(self, address: int) -> tuple[bytes, int]:
        base, _ = self.allocation(address)
        return _HANDLE.pack(os.getpid(), _allocated[base][0]).ljust(HANDLE_BYTES, b"\0"), address - base

    def allocation(self, address: int) -> tuple[int, int]:
        sizes = {base: size for base, (_, size) in _allocated.items()}
        sizes |= {base: size for base, (_, size) in _opened.items()}
        for base, size in sizes.items():
            if base <= address < base + size:
                return base, size
        raise TransferError("CUDA knows of no allocation there (error 1)")

    def open(self, handle: bytes) -> int:
        pid, number = _HANDLE.unpack_from(handle)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError("cudaIpcOpenMemHandle: invalid argument (error 1)") from error
        try:
            size = os.fstat(fd).st_size
            mapping = MemfdMapping(fd, size)
        finally:
            os.close(fd)
        _opened[mapping.address] = mapping, size
        return mapping.address

    def close(self, address: int) -> None:
        del _opened[address]

    def allocate_host(self, size: int, *, write_combined: bool) -> int:
        assert not write_combined
        memory = mmap.mmap(-1, size)
        address = _address(memory)
        pinned[address] = memory
        return address

    def free_host(self, address: int) -> None:
        del pinned[address]

    @contextlib.contextmanager
    def stream(self) -> Iterator["FakeCuda"]:
        yield self

    def copy(self, to: int, source: int, size: int) -> None:
        time.sleep(size / SPEED)
        ctypes.memmove(to, source, size)

    def wait(self) -> None:
        """Do nothing: copies have ended."""

    def point(self, *, timed: bool = False) -> "_Point":
        return _Point()


class _Point:
    def __init__(self) -> None:
        self.at = time.monotonic()

    def seconds_since(self, start: "_Point") -> float:
        return self.at - start.at

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: copies have ended."""

    def hold_back(self, stream: int) -> None:
        """Do nothing: copies have ended."""

    def close(self) -> None:
        """Do nothing."""


def install() -> None:
    """Have this process, which tests have started, use the stand-in."""
    for module, name, value in REPLACED:
        setattr(module, name, value)


REPLACED = ((cuda_ipc, "Cuda", FakeCuda), (arena, "Cuda", FakeCuda), (cuda_ipc, "PIECE", PIECE))
"""Module, name and replacement of each part; tests pass them to `monkeypatch.setattr`."""


def _free(address: int) -> None:
    fd, _ = _allocated.pop(address)
    os.close(fd)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
