"""Bytes that processes of this host hand to each other without copying them: each in a memfd, which travels as its number.

Embeddings of images are megabytes, made in one process, kept in a second and used in a third. The one that keeps them has a descriptor
open for each; who reads them maps them and has none.
"""

import ctypes
import mmap
import os
import resource
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeAlias
from weakref import finalize

import msgspec

from engine.transfer.base import NotFromHere
from engine.transfer.process import ProcessId, check_reachable, this_process
from engine.transfer.shared_memory import MemfdMapping, make_memory, open_memory

SHARED_FROM = 1 << 20
"""Bytes from which it pays: less is copied in the time that it takes to open a descriptor."""
_open: set[int] = set()
"""Descriptors of this process's."""


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Where another process of this host finds them, for as long as their owner has them open."""

    process: ProcessId
    fd: int
    inode: int
    size: int


class SharedBytes:
    """What one descriptor of a memfd stands for. It is closed with the object; the memory is freed when nobody has it open or mapped."""

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over."""
        facts = os.fstat(fd)
        self.fd = fd
        self._inode, self._size = facts.st_ino, facts.st_size
        _open.add(fd)
        finalize(self, _close, fd).atexit = False

    @classmethod
    def of(cls, data: "Buffer") -> Self:
        """A copy of contiguous bytes. It is written by a call, which takes half as long as to write where it is mapped. Raises OSError."""
        view = memoryview(data).cast("B")
        memory = cls(make_memory(len(view)))
        while view:
            view = view[os.write(memory.fd, view) :]
        return memory

    def __len__(self) -> int:
        return self._size

    @property
    def reference(self) -> Reference:
        return Reference(_here(os.getpid()), self.fd, self._inode, self._size)

    def read(self) -> memoryview:
        """The bytes, mapped; what is written there nobody else sees. Lives for itself. Raises OSError."""
        return _mapped(self.fd, self._size)

    def copy(self) -> bytes:
        """Without another descriptor or mapping."""
        return os.pread(self.fd, self._size, 0)


if TYPE_CHECKING:
    from typing_extensions import Buffer

    Data: TypeAlias = bytes | memoryview | SharedBytes
else:
    Data = bytes  # as a field of a message it is that alone: what is shared travels as a Reference, beside it


def shared_or_copied(data: "Buffer") -> Data:
    """By its size, and as there is room for."""
    view = memoryview(data).cast("B")
    if len(view) < SHARED_FROM or crowded():
        return bytes(view)
    try:
        return SharedBytes.of(view)
    except OSError:
        return bytes(view)


def crowded() -> bool:
    """Whether a quarter of the descriptors that this process may have are such already."""
    return len(_open) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def readable(data: Data) -> bytes | memoryview:
    """What holds the bytes."""
    if not isinstance(data, SharedBytes):
        return data
    try:
        return data.read()
    except OSError:
        return data.copy()


def opened(reference: Reference) -> memoryview:
    """What another process shares, mapped: it stays readable when that process lets go. Raises NotFromHere, OSError."""
    check_reachable(reference.process)
    fd = open_memory(reference.process, reference.fd, reference.inode)
    try:
        if os.fstat(fd).st_size != reference.size:
            raise NotFromHere(f"the memory has not the {reference.size} bytes that it is said to have")
        return _mapped(fd, reference.size)
    finally:
        os.close(fd)


def _mapped(fd: int, size: int) -> memoryview:
    """Python's own mmap would keep a descriptor open."""
    mapping = MemfdMapping(fd, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
    array = (ctypes.c_char * size).from_address(mapping.address)
    array.mapping = mapping  # type: ignore[attr-defined] # it lives as long as the array, and the array as long as its views
    return memoryview(array).cast("B")


def _close(fd: int) -> None:
    _open.discard(fd)
    os.close(fd)


@lru_cache(1)
def _here(pid: int) -> ProcessId:
    return this_process()
