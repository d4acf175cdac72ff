"""Bytes that processes of one host pass to each other without copying.

They lie in a memfd, and only the number of its descriptor is sent.

Embeddings are megabytes, made in one process, cached in a second and used in a third. The process that keeps them has
one descriptor open for each; a reader maps them and needs none.
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
from engine.transfer.process_id import ProcessId, check_reachable, this_process
from engine.transfer.shared_memory import MemfdMapping, make_memory, open_memory

SHARED_FROM = 1 << 20
"""Bytes from which sharing pays: fewer are copied in the time that opening a descriptor takes."""
open_descriptors: set[int] = set()
"""Descriptors of this process's `SharedBytes`."""


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """A reference by which another process of this host finds bytes, valid while their owner has them open."""

    process: ProcessId
    fd: int
    inode: int
    size: int


class SharedBytes:
    """The bytes of one memfd.

    Its descriptor is closed with the object; the memory is freed when no process has it open or mapped.
    """

    def __init__(self, fd: int) -> None:
        """Take ownership of the descriptor."""
        facts = os.fstat(fd)
        self.fd = fd
        self._inode = facts.st_ino
        self._size = facts.st_size
        open_descriptors.add(fd)
        finalize(self, _close, fd).atexit = False

    @classmethod
    def of(cls, data: "Buffer") -> Self:
        """Copy contiguous bytes into new shared memory.

        `write` takes half as long as copying into a mapping. Raises OSError.
        """
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
        """Return the bytes, mapped privately; the view may outlive this object. Raises OSError."""
        return _mapped(self.fd, self._size)

    def copy(self) -> bytes:
        """Return a copy of the bytes, which needs no further descriptor or mapping."""
        return os.pread(self.fd, self._size, 0)


if TYPE_CHECKING:
    from typing_extensions import Buffer

    Data: TypeAlias = bytes | memoryview | SharedBytes
else:
    Data = bytes  # a field of a message holds plain bytes only; shared bytes travel beside it, as a Reference


def shared_or_copied(data: "Buffer") -> Data:
    """Return shared bytes if the data is large and a descriptor is available, else a copy."""
    view = memoryview(data).cast("B")
    if len(view) < SHARED_FROM or crowded():
        return bytes(view)
    try:
        return SharedBytes.of(view)
    except OSError:
        return bytes(view)


def crowded() -> bool:
    """Whether shared bytes use more than a quarter of the descriptors this process may open."""
    return len(open_descriptors) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def readable(data: Data) -> bytes | memoryview:
    """Return the bytes of either kind of data."""
    if not isinstance(data, SharedBytes):
        return data
    try:
        return data.read()
    except OSError:
        return data.copy()


def opened(reference: Reference) -> memoryview:
    """Map what another process shares. It stays readable after that process closes it. Raises NotFromHere, OSError."""
    check_reachable(reference.process)
    fd = open_memory(reference.process, reference.fd, reference.inode)
    try:
        if os.fstat(fd).st_size != reference.size:
            raise NotFromHere(f"the memory does not have the announced {reference.size} bytes")
        return _mapped(fd, reference.size)
    finally:
        os.close(fd)


def _mapped(fd: int, size: int) -> memoryview:
    """Map a memfd. Python's own mmap would keep a descriptor open."""
    mapping = MemfdMapping(fd, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
    array = (ctypes.c_char * size).from_address(mapping.address)
    # The mapping lives as long as the array, and the array as long as its views.
    array.mapping = mapping  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _close(fd: int) -> None:
    open_descriptors.discard(fd)
    os.close(fd)


@lru_cache(1)
def _here(pid: int) -> ProcessId:
    return this_process()
