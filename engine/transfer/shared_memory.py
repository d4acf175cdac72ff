"""KV blocks in host memory that other processes of the same host map and copy from.

The memory is a memfd. It has no name, so nothing is left behind however its owner ends. A peer opens it through
/proc/PID/fd, which the kernel allows to processes of the same user only. Its size is sealed: an owner that shrinks it
cannot crash a peer that has mapped it.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from weakref import finalize

import msgspec

from engine.transfer.base import NotFromHere, Read, Region, TransferError, check_cancelled, split_reads
from engine.transfer.mapped import MappedMethod, Owner
from engine.transfer.process_id import ProcessId, lives

PIECE = 16 << 20
"""Bytes copied between two checks for cancellation: about two milliseconds."""
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0
_MAP_FIXED = 0x10
_LARGE_PAGE = 2 << 20


class _MemfdRange(msgspec.Struct, frozen=True, array_like=True):
    """Location of a region: `size` bytes from `offset` of a memfd.

    Its owner has the memfd open as descriptor `fd`; `inode` identifies it.
    """

    fd: int
    inode: int
    offset: int
    size: int


def make_memory(size: int) -> int:
    """Return a descriptor of a new memfd of `size` zero bytes, readable by processes of this host. Raises OSError."""
    fd = os.memfd_create("trellis", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALED)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_memory(process: ProcessId, number: int, inode: int) -> int:
    """Open the memfd that `process`, on this host, has open as descriptor `number`. Raises NotFromHere and OSError."""
    strange = NotFromHere(f"descriptor {number} of process {process.pid} is not the memory it offered")
    path = f"/proc/{process.pid}/fd/{number}"
    if not os.readlink(path).startswith("/memfd:"):  # opening anything else might block or have side effects
        raise strange
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_ino != inode or not lives(process) or not _is_sealed(fd):
            raise strange
    except BaseException:
        os.close(fd)
        raise
    return fd


def shared_memory(size: int) -> mmap.mmap:
    """Return `size` zero bytes that peers on this host can read, freed with the object. Raises OSError."""
    fd = make_memory(size)
    try:
        return mmap.mmap(fd, size)  # keeps a descriptor of its own
    finally:
        os.close(fd)


class MemfdMapping:
    """A whole memfd, mapped as long as this object lives, read-only by default. Raises OSError."""

    def __init__(self, fd: int, size: int, protection: int = mmap.PROT_READ, flags: int = mmap.MAP_SHARED) -> None:
        self.address = map_memory(None, size, protection, flags, fd)
        finalize(self, _libc.munmap, self.address, size).atexit = False


class LargeMapping:
    """A whole memfd at an address where the system can use large pages, as long as this object lives. It is writable
    until `protect`, unless the descriptor is not. Raises OSError."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        room = size + _LARGE_PAGE
        start = map_memory(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        finalize(self, _libc.munmap, start, room).atexit = False
        self._size = size
        self.address = -(-start // _LARGE_PAGE) * _LARGE_PAGE
        self._map(fd, mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ)

    def protect(self, fd: int) -> None:
        """Map the same memory by a descriptor that is only for reading, at the same address."""
        self._map(fd, mmap.PROT_READ)

    def _map(self, fd: int, protection: int) -> None:
        map_memory(self.address, self._size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _libc.madvise(self.address, self._size, mmap.MADV_HUGEPAGE)  # the system may have none for memfds


def map_memory(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    """Return the address of a new mapping. Raises OSError."""
    found: int = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def reopen(fd: int) -> int:
    """Return another descriptor of a memfd, only for reading. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class SharedMemory(MappedMethod[_MemfdRange, MemfdMapping]):
    """The method for host memory of one host.

    Raises TransferError for regions that were not made by `shared_memory`.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        super().__init__("shared_memory", Owner[_MemfdRange], regions, [_memory(region) for region in regions])

    def _map(self, owner: Owner[_MemfdRange]) -> list[MemfdMapping]:
        try:
            return [_open(owner.process, memory) for memory in owner.regions]
        except OSError as error:
            raise NotFromHere(
                f"the memory of process {owner.process.pid} cannot be opened: {error.strerror}"
            ) from error

    def _copy(
        self, owner: Owner[_MemfdRange], mappings: Sequence[MemfdMapping], reads: Sequence[Read], cancelled: Event
    ) -> None:
        for read in split_reads(reads, PIECE):
            check_cancelled(cancelled)
            source = mappings[read.region].address + owner.regions[read.region].offset + read.remote_offset
            ctypes.memmove(self._regions[read.region].address + read.local_offset, source, read.size)


def _open(process: ProcessId, memory: _MemfdRange) -> MemfdMapping:
    fd = open_memory(process, memory.fd, memory.inode)
    try:
        size = os.fstat(fd).st_size
        if memory.offset < 0 or memory.offset + memory.size > size:
            raise NotFromHere(f"the peer offers {memory.size} bytes from {memory.offset} of {size}")
        return MemfdMapping(fd, size)
    finally:
        os.close(fd)


def _memory(region: Region) -> _MemfdRange:
    """Find the memfd that contains a region of this process, by the kernel's table of mappings."""
    if region.device >= 0:
        raise TransferError("the KV cache is in a GPU's memory")
    start, offset, inode = _mapping_at(region)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by another thread in the meantime
            facts = os.stat(int(name))
            if stat.S_ISREG(facts.st_mode) and facts.st_ino == inode and _is_sealed(int(name)):
                return _MemfdRange(int(name), inode, offset + region.address - start, region.size)
    raise TransferError("the memory of the KV cache was not made to be shared")


def _mapping_at(region: Region) -> tuple[int, int, int]:
    """Return address, file offset and inode of the mapping that contains the whole region."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= region.address and region.address + region.size <= end and path and path[0].startswith("/memfd:"):
            return start, int(offset, 16), int(inode)
    raise TransferError("the memory of the KV cache was not made to be shared")


def _is_sealed(fd: int) -> bool:
    return (
        os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALED == SEALED
    )
