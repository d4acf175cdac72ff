"""The few calls of the CUDA runtime that a transfer between GPUs needs, by ctypes.

The library is the same one that the other CUDA code of the process uses, so that both share one context per device.
Errors become TransferError and are cleared in the runtime, so that no other code sees them.
"""

import contextlib
import ctypes
import ctypes.util
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from engine.transfer.base import TransferError

HANDLE_BYTES = 64
COPY_KIND_BY_POINTERS = 4
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
IPC_LAZY_ENABLE_PEER_ACCESS = 1
HOST_ALLOC_WRITE_COMBINED = 4
NOT_READY = 600


class Handle(ctypes.Structure):
    _fields_ = [("reserved", c_ubyte * HANDLE_BYTES)]


SIGNATURES: dict[str, list[Any]] = {
    "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "cudaGetDevice": [c_void_p],
    "cudaSetDevice": [c_int],
    "cudaFree": [c_void_p],
    "cudaHostAlloc": [c_void_p, c_size_t, c_uint],
    "cudaFreeHost": [c_void_p],
    "cudaIpcGetMemHandle": [c_void_p, c_void_p],
    "cudaIpcOpenMemHandle": [c_void_p, Handle, c_uint],
    "cudaIpcCloseMemHandle": [c_void_p],
    "cudaStreamCreateWithFlags": [c_void_p, c_uint],
    "cudaStreamSynchronize": [c_void_p],
    "cudaStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cudaStreamDestroy": [c_void_p],
    "cudaEventCreateWithFlags": [c_void_p, c_uint],
    "cudaEventRecord": [c_void_p, c_void_p],
    "cudaEventQuery": [c_void_p],
    "cudaEventElapsedTime": [c_void_p, c_void_p, c_void_p],
    "cudaEventSynchronize": [c_void_p],
    "cudaEventDestroy": [c_void_p],
}


class Cuda:
    """The CUDA runtime and driver. Raises TransferError where there is no CUDA."""

    def __init__(self) -> None:
        path = _library()
        try:
            self._runtime = ctypes.CDLL(path)
            self._driver = ctypes.CDLL("libcuda.so.1")
            # PyDLL keeps the GIL: these calls take a microsecond each, and reacquiring the GIL may take milliseconds.
            self._quick = ctypes.PyDLL(path)
        except OSError as error:
            raise TransferError(f"CUDA's libraries cannot be loaded: {error}") from error
        self._runtime.cudaGetErrorString.restype = c_char_p
        for name, arguments in SIGNATURES.items():
            for library in (self._runtime, self._quick):
                getattr(library, name).argtypes = arguments
        self._range = self._driver.cuMemGetAddressRange_v2
        self._range.argtypes = [c_void_p, c_void_p, c_uint64]

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make `device` this thread's current device inside the block."""
        before = c_int()
        self._call_quick("cudaGetDevice", byref(before))
        if before.value == device:
            yield
            return
        self._call("cudaSetDevice", device)
        try:
            yield
        finally:
            self._call("cudaSetDevice", before.value)

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation that contains an address, and the address's offset in it.

        The address belongs to the current device.
        """
        self._call("cudaFree", None)  # creates the device's context if there is none
        base, _ = self.allocation(address)
        handle = Handle()
        self._call("cudaIpcGetMemHandle", byref(handle), base)
        return bytes(handle), address - base

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the base address and the size of the allocation that contains an address of the current device."""
        base, size = c_uint64(), c_size_t()
        if code := self._range(byref(base), byref(size), address):
            raise TransferError(f"CUDA knows of no allocation there (error {code})")
        return base.value, size.value

    def open(self, handle: bytes) -> int:
        """Map another process's allocation for the current device; if it is on another GPU, enable access to it."""
        address = c_void_p()
        self._call("cudaIpcOpenMemHandle", byref(address), Handle.from_buffer_copy(handle), IPC_LAZY_ENABLE_PEER_ACCESS)
        assert address.value is not None
        return address.value

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def allocate_host(self, size: int, *, write_combined: bool) -> int:
        """Return the address of new pinned memory of the host, until `free_host`. The processor reads write-combined
        memory very slowly."""
        address = c_void_p()
        self._call("cudaHostAlloc", byref(address), size, HOST_ALLOC_WRITE_COMBINED if write_combined else 0)
        assert address.value is not None
        return address.value

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    @contextlib.contextmanager
    def stream(self) -> "Iterator[Stream]":
        """Yield a new stream on the current device. Its work has ended when the block ends, in whatever way."""
        stream, event = c_void_p(), c_void_p()
        with contextlib.ExitStack() as stack:
            self._call("cudaStreamCreateWithFlags", byref(stream), STREAM_NON_BLOCKING)
            stack.callback(self._call, "cudaStreamDestroy", stream)
            self._call("cudaEventCreateWithFlags", byref(event), EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)
            stack.callback(self._call, "cudaEventDestroy", event)
            stack.callback(self._call, "cudaStreamSynchronize", stream)
            yield Stream(self, stream, event)

    def _call(self, name: str, *arguments: object) -> None:
        self._check(getattr(self._runtime, name)(*arguments), name)

    def _call_quick(self, name: str, *arguments: object) -> None:
        """Call what never waits, and keep the GIL."""
        self._check(getattr(self._quick, name)(*arguments), name)

    def _check(self, code: int, name: str) -> None:
        if code:
            self._runtime.cudaGetLastError()
            raise TransferError(f"{name}: {self._runtime.cudaGetErrorString(code).decode()} (error {code})")


class StreamPoint:
    """A point in the work of a stream: the copies begun before it. With `timed`, time is measured between two."""

    def __init__(self, cuda: Cuda, stream: c_void_p, *, timed: bool = False) -> None:
        self._cuda = cuda
        self._event = c_void_p()
        flags = EVENT_BLOCKING_SYNC if timed else EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING
        cuda._call_quick("cudaEventCreateWithFlags", byref(self._event), flags)
        cuda._call_quick("cudaEventRecord", self._event, stream)

    def reached(self) -> bool:
        """Return whether the copies have ended, without waiting."""
        code = self._cuda._quick.cudaEventQuery(self._event)
        if code != NOT_READY:
            self._cuda._check(code, "cudaEventQuery")
        return not code

    def seconds_since(self, start: "StreamPoint") -> float:
        """Return the time between two points that have been reached."""
        milliseconds = c_float()
        self._cuda._call_quick("cudaEventElapsedTime", byref(milliseconds), start._event, self._event)
        return milliseconds.value / 1e3

    def wait(self) -> None:
        """Sleep until the copies have ended."""
        self._cuda._call("cudaEventSynchronize", self._event)

    def hold_back(self, stream: int) -> None:
        """Have the work that a stream is given from now on begin after the copies; does not wait."""
        self._cuda._call_quick("cudaStreamWaitEvent", stream, self._event, 0)

    def close(self) -> None:
        self._cuda._call_quick("cudaEventDestroy", self._event)


class Stream:
    """A CUDA stream for copies."""

    def __init__(self, cuda: Cuda, stream: c_void_p, event: c_void_p) -> None:
        self._cuda = cuda
        self._stream = stream
        self._event = event

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy between two addresses in device memory, of one GPU or two, or in pinned memory; does not wait."""
        self._cuda._call_quick("cudaMemcpyAsync", to, source, size, COPY_KIND_BY_POINTERS, self._stream)

    def point(self, *, timed: bool = False) -> StreamPoint:
        """Return the present end of this stream's work. It may outlive the stream; close it."""
        return StreamPoint(self._cuda, self._stream, timed=timed)

    def wait(self) -> None:
        """Sleep until all copies on this stream have ended."""
        self._cuda._call("cudaEventRecord", self._event, self._stream)
        self._cuda._call("cudaEventSynchronize", self._event)


def _library() -> str:
    """Return the path of the CUDA runtime that is loaded already, else the system's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libcudart.so"):
            return path[0]
    found = ctypes.util.find_library("cudart")
    if found is None:
        raise TransferError("the CUDA runtime is not on this machine")
    return found
