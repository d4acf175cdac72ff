"""Device memory that processes share, by the CUDA driver's calls for virtual memory.

The memory service creates it and has the driver export it as a file descriptor. It maps nothing and needs no CUDA
context, so it costs the device what the weights take and no more. Engines import the descriptor into their own
addresses. Memory is freed when no process has a handle, a descriptor or a mapping of it any more, so the end of a
process ends its part.
"""

import ctypes
import os
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any
from weakref import finalize

from engine.memory.wire import MemoryServiceError

_PINNED = 1
_ON_DEVICE = 1
_FILE_DESCRIPTOR = 1
_SMALLEST = 0
"""The granularity that is asked for."""
READ, READ_AND_WRITE = 1, 3


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("location", _Location), ("flags", c_int)]


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_int],
    "cuDeviceGetCount": [c_void_p],
    "cuDeviceGet": [c_void_p, c_int],
    "cuDeviceGetUuid_v2": [c_void_p, c_int],
    "cuMemGetAllocationGranularity": [c_void_p, c_void_p, c_int],
    "cuMemCreate": [c_void_p, c_size_t, c_void_p, c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemExportToShareableHandle": [c_void_p, c_uint64, c_int, c_uint64],
    "cuMemImportFromShareableHandle": [c_void_p, c_void_p, c_int],
    "cuMemAddressReserve": [c_void_p, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, c_void_p, c_size_t],
}


def load_driver() -> Any:
    """Return the driver's library. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


class Driver:
    """The calls of the CUDA driver that sharing memory needs. Raises MemoryServiceError where there is no CUDA, and
    whenever a call fails."""

    def __init__(self, load: Callable[[], Any] = load_driver) -> None:
        try:
            library = load()
            self._calls = {name: getattr(library, name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise MemoryServiceError(f"CUDA's driver cannot be used: {error}") from error
        for name, arguments in _SIGNATURES.items():
            self._calls[name].argtypes = arguments
        self._call("cuInit", 0)

    def uuid(self, ordinal: int) -> str:
        """Return the UUID of a device, or of its part that this process sees, as `GPU-` and 32 digits."""
        device, uuid = c_int(), (c_ubyte * 16)()
        self._call("cuDeviceGet", byref(device), ordinal)
        self._call("cuDeviceGetUuid_v2", byref(uuid), device.value)
        return f"GPU-{bytes(uuid).hex()}"

    def ordinal(self, uuid: str) -> int:
        """Return the number of the device with this UUID."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        for ordinal in range(count.value):
            if self.uuid(ordinal) == uuid:
                return ordinal
        raise MemoryServiceError(f"the device {uuid} is not visible here (CUDA_VISIBLE_DEVICES)")

    def granularity(self, ordinal: int) -> int:
        """Return what sizes of memory are multiples of."""
        size = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(size), byref(_properties(ordinal)), _SMALLEST)
        return size.value

    def create(self, ordinal: int, size: int) -> int:
        """Return a handle of new memory."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), size, byref(_properties(ordinal)), 0)
        return handle.value

    def export(self, handle: int) -> int:
        """Return a file descriptor of memory."""
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, _FILE_DESCRIPTOR, 0)
        os.set_inheritable(fd.value, False)
        return fd.value

    def open(self, fd: int) -> int:
        """Return a handle of the memory behind a file descriptor, which stays open."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _FILE_DESCRIPTOR)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def reserve(self, size: int) -> int:
        """Return an address with nothing behind it."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int, ordinal: int, access: int) -> None:
        """Set what a device may do with mapped memory: READ or READ_AND_WRITE."""
        described = _Access(_Location(_ON_DEVICE, ordinal), access)
        self._call("cuMemSetAccess", address, size, byref(described), 1)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def give_back(self, address: int, size: int) -> None:
        """Free an address of `reserve`."""
        self._call("cuMemAddressFree", address, size)

    def _call(self, name: str, *arguments: object) -> None:
        if code := self._calls[name](*arguments):
            raise MemoryServiceError(f"{name} failed with CUDA's error {code}")


def _properties(ordinal: int) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_FILE_DESCRIPTOR, location=_Location(_ON_DEVICE, ordinal))


class DeviceMemory:
    """Memory of one device, as the service owns it. Raises MemoryServiceError."""

    def __init__(self, uuid: str, driver: Driver | None = None) -> None:
        self._driver = driver or Driver()
        self._ordinal = self._driver.ordinal(uuid)
        self._handles: dict[int, int] = {}
        """Handle of each descriptor. It is kept: that a descriptor alone keeps memory is documented nowhere."""

    def allocate(self, size: int) -> int:
        """Return a descriptor of new memory; `size` is a multiple of the granularity."""
        handle = self._driver.create(self._ordinal, size)
        try:
            fd = self._driver.export(handle)
        except MemoryServiceError:
            self._driver.release(handle)
            raise
        self._handles[fd] = handle
        return fd

    def free(self, fd: int) -> None:
        os.close(fd)
        self._driver.release(self._handles.pop(fd))


class MappedDeviceMemory:
    """A descriptor's device memory at an address of this process, as long as this object lives; writable until
    `protect`. Raises MemoryServiceError."""

    def __init__(self, driver: Driver, ordinal: int, fd: int, size: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        self._size = size
        self.address = driver.reserve(size)
        try:
            handle = driver.open(fd)
            try:
                driver.map(self.address, size, handle)
            finally:
                driver.release(handle)  # the mapping keeps the memory
        except MemoryServiceError:
            driver.give_back(self.address, size)
            raise
        finalize(self, _unmap, driver, self.address, size).atexit = False
        driver.allow(self.address, size, ordinal, READ_AND_WRITE)

    def protect(self) -> None:
        """Let the device only read the memory from now on."""
        self._driver.allow(self.address, self._size, self._ordinal, READ)


def _unmap(driver: Driver, address: int, size: int) -> None:
    driver.unmap(address, size)
    driver.give_back(address, size)
