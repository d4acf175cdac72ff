"""A stand-in for the CUDA driver's calls that share memory: memfds take the place of device memory.

It obeys what the driver documents: sizes are multiples of the granularity, memory lives as long as a handle, a
descriptor or a mapping of it, addresses are unmapped as they were mapped, and what is not allowed cannot be written.
"""

import ctypes
import itertools
import mmap
import os
import re
from collections.abc import Callable
from typing import Any

from engine.transfer.shared_memory import map_memory

GRANULARITY = 1 << 16
UUID = bytes(range(16))
INVALID, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801
_FIXED = 0x10
_libc = ctypes.CDLL(None)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Call:
    """A function of the library; ctypes' argument types may be set, and are ignored."""

    argtypes: list[Any]

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> int:
        return self._function(*(getattr(argument, "_obj", argument) for argument in arguments))


class FakeDriver:
    """One device with `memory` bytes."""

    def __init__(self, memory: int = 1 << 24) -> None:
        self.memory = memory
        self.handles: dict[int, int] = {}
        """Memfd of each handle."""
        self.mappings: dict[int, int] = {}
        """Size of each mapping by its address."""
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> _Call:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return _Call(getattr(self, re.sub("[A-Z]", r"_\g<0>", name.removeprefix("cu")).lower()))

    @property
    def created(self) -> int:
        """Bytes behind handles, each piece of memory once."""
        files = {(os.fstat(fd).st_ino, os.fstat(fd).st_size) for fd in self.handles.values()}
        return sum(size for _, size in files)

    def _init(self, flags: int) -> int:
        return 0

    def _device_get_count(self, count: Any) -> int:
        count.value = 1
        return 0

    def _device_get(self, device: Any, ordinal: int) -> int:
        device.value = ordinal
        return 0

    def _device_get_uuid_v2(self, uuid: Any, device: int) -> int:
        uuid[:] = UUID
        return 0

    def _mem_get_allocation_granularity(self, size: Any, properties: Any, option: int) -> int:
        assert (properties.type, properties.handle_types, properties.location.type) == (1, 1, 1)
        size.value = GRANULARITY
        return 0

    def _mem_create(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        if size % GRANULARITY:
            return INVALID
        if self.created + size > self.memory:
            return OUT_OF_MEMORY
        fd = os.memfd_create("device")
        os.ftruncate(fd, size)
        return self._keep(handle, fd)

    def _keep(self, handle: Any, fd: int) -> int:
        handle.value = next(self._numbers)
        self.handles[handle.value] = fd
        return 0

    def _mem_release(self, handle: int) -> int:
        os.close(self.handles.pop(handle))
        return 0

    def _mem_export_to_shareable_handle(self, fd: Any, handle: int, kind: int, flags: int) -> int:
        fd.value = os.dup(self.handles[handle])
        return 0

    def _mem_import_from_shareable_handle(self, handle: Any, fd: Any, kind: int) -> int:
        return self._keep(handle, os.dup(fd.value))

    def _mem_address_reserve(self, address: Any, size: int, alignment: int, hint: int, flags: int) -> int:
        address.value = map_memory(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        return 0

    def _mem_address_free(self, address: int, size: int) -> int:
        assert not any(address <= mapped < address + size for mapped in self.mappings), "still mapped"
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        return 0

    def _mem_map(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        assert address not in self.mappings, "mapped twice"
        if size != os.fstat(self.handles[handle]).st_size:
            return NOT_SUPPORTED  # an H200's driver 580 refuses a part of a handle's memory
        map_memory(address, size, 0, mmap.MAP_SHARED | _FIXED, self.handles[handle])
        self.mappings[address] = size
        return 0

    def _mem_unmap(self, address: int, size: int) -> int:
        if self.mappings.pop(address, None) != size:
            return INVALID
        map_memory(address, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)
        return 0

    def _mem_set_access(self, address: int, size: int, access: Any, count: int) -> int:
        assert sum(self.mappings[part] for part in self.mappings if address <= part < address + size) == size
        return int(
            _libc.mprotect(address, size, {1: mmap.PROT_READ, 3: mmap.PROT_READ | mmap.PROT_WRITE}[access.flags])
        )
