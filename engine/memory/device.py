"""Device memory that processes share, by the CUDA driver's calls for virtual memory.

The memory service creates it and has the driver export it as a file descriptor. It maps nothing and needs no CUDA
context, so it costs the device what the weights take and no more. Engines import the descriptor into their own
addresses. Memory is freed when no process has a handle, a descriptor or a mapping of it any more, so the end of a
process ends its part.
"""

import ctypes
import os
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
_STAND_IN_BYTES = 64 << 20
"""Memory behind addresses that are only reserved: more than a KV block, so that no block overlaps itself."""


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
    """Load the driver's library. Raises OSError if it is not installed."""
    return ctypes.CDLL("libcuda.so.1")


class Driver:
    """The calls of the CUDA driver that sharing memory needs. Those that map memory need a context on the calling
    thread, which torch makes with its first tensor on the device.

    Raises MemoryServiceError where there is no CUDA, and whenever a call fails.
    """

    def __init__(self) -> None:
        try:
            library = load_driver()
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

    def __init__(self, uuid: str) -> None:
        self._driver = Driver()
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


class ReservedDeviceMemory:
    """Addresses of device memory, as long as this object lives. Until `take` one small piece of memory is behind all of
    them: kernels run and are captured in CUDA graphs, and their results mean nothing. Raises MemoryServiceError."""

    def __init__(self, size: int, ordinal: int) -> None:
        self._driver = Driver()
        self._ordinal = ordinal
        granularity = self._driver.granularity(ordinal)
        self._size = -(-size // granularity) * granularity
        piece = min(-(-_STAND_IN_BYTES // granularity) * granularity, self._size)
        self.address = self._driver.reserve(self._size)
        self._parts: list[tuple[int, int]] = []
        """Address and size of each mapping."""
        finalize(self, _unmap_parts, self._driver, self.address, self._size, self._parts).atexit = False
        self._map(piece)

    def take(self) -> None:
        """Have memory of its own behind each address, whatever it contains. Nothing may run on the device."""
        self.release()
        self._map(self._size)

    @property
    def released(self) -> bool:
        """Whether nothing is behind the addresses."""
        return not self._parts

    def release(self) -> None:
        """Give the memory back, until `take`. Nothing may use it."""
        while self._parts:
            self._driver.unmap(*self._parts.pop())

    def _map(self, piece: int) -> None:
        """Map one piece of memory behind as many addresses as it fills, and another behind the rest: the driver maps
        whole pieces only (error 801)."""
        whole = self._size // piece * piece
        for start, stop, size in ((0, whole, piece), (whole, self._size, self._size - whole)):
            if start < stop:
                handle = self._driver.create(self._ordinal, size)
                try:
                    for offset in range(start, stop, size):
                        part = self.address + offset, size
                        self._driver.map(*part, handle)
                        self._parts.append(part)
                finally:
                    self._driver.release(handle)  # the mappings keep the memory
        self._driver.allow(self.address, self._size, self._ordinal, READ_AND_WRITE)


def _unmap_parts(driver: Driver, address: int, size: int, parts: list[tuple[int, int]]) -> None:
    for part in parts:
        driver.unmap(*part)
    driver.give_back(address, size)


def _unmap(driver: Driver, address: int, size: int) -> None:
    driver.unmap(address, size)
    driver.give_back(address, size)
