"""Bytes that processes of this host hand to each other without copying them: each in a memfd, which travels as its number.

Embeddings of images are megabytes, made in one process, kept in a second and used in a third.
"""

import mmap
import os
import resource
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeAlias
from weakref import finalize

import msgspec

from engine.transfer.process import Process, check_reachable, this_process
from engine.transfer.shared_memory import make_memory, open_memory

SHARED_FROM = 1 << 20
"""Bytes from which it pays: less is copied in the time that it takes to open a descriptor."""


_open: set[int] = set()
"""Descriptors of this process's."""


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Where another process of this host finds them, for as long as their owner has them open."""

    process: Process
    fd: int
    inode: int
    size: int


class SharedBytes:
    """What one descriptor of a memfd stands for. It is closed with the object, and the memory freed with the last one of any process."""

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

    @classmethod
    def open(cls, reference: Reference) -> Self:
        """Raises NotFromHere, OSError."""
        check_reachable(reference.process)
        return cls(open_memory(reference.process, reference.fd, reference.inode))

    def __len__(self) -> int:
        return self._size

    @property
    def reference(self) -> Reference:
        return Reference(_here(os.getpid()), self.fd, self._inode, self._size)

    def read(self) -> mmap.mmap:
        """To read from: what is written there is seen by nobody else. Lives for itself."""
        return mmap.mmap(self.fd, self._size, access=mmap.ACCESS_COPY)


if TYPE_CHECKING:
    from typing_extensions import Buffer

    Data: TypeAlias = bytes | SharedBytes
else:
    Data = bytes  # as a field of a message it is that alone: what is shared travels as a Reference, beside it


def readable(data: Data) -> bytes | mmap.mmap:
    """What holds the bytes."""
    return data.read() if isinstance(data, SharedBytes) else data


def kept(memory: SharedBytes) -> Data:
    """As it is, or copied if a quarter of the descriptors that this process may have are such already."""
    return bytes(memory.read()) if len(_open) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4 else memory


def _close(fd: int) -> None:
    _open.discard(fd)
    os.close(fd)


@lru_cache(1)
def _here(pid: int) -> Process:
    return this_process()
