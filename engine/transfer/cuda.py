"""The few calls of the CUDA runtime that a transfer between GPUs needs, by ctypes.

The library is the very one that the process's other CUDA code uses: both then share one context for each device. Errors become
TransferError, and are taken back from the runtime, so that nobody else finds them there.
"""

import contextlib
import ctypes
import ctypes.util
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from engine.transfer.base import TransferError

HANDLE_BYTES = 64
COPY_KIND_BY_POINTERS = 4
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING = 1, 2
IPC_LAZY_ENABLE_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    _fields_ = [("reserved", c_ubyte * HANDLE_BYTES)]


SIGNATURES: dict[str, list[Any]] = {
    "cudaGetDevice": [c_void_p],
    "cudaSetDevice": [c_int],
    "cudaFree": [c_void_p],
    "cudaIpcGetMemHandle": [c_void_p, c_void_p],
    "cudaIpcOpenMemHandle": [c_void_p, Handle, c_uint],
    "cudaIpcCloseMemHandle": [c_void_p],
    "cudaStreamCreateWithFlags": [c_void_p, c_uint],
    "cudaStreamSynchronize": [c_void_p],
    "cudaStreamDestroy": [c_void_p],
    "cudaEventCreateWithFlags": [c_void_p, c_uint],
    "cudaEventRecord": [c_void_p, c_void_p],
    "cudaEventSynchronize": [c_void_p],
    "cudaEventDestroy": [c_void_p],
}


class Cuda:
    """Raises TransferError where there is no CUDA."""

    def __init__(self) -> None:
        path = _library()
        try:
            self._runtime = ctypes.CDLL(path)
            self._driver = ctypes.CDLL("libcuda.so.1")
            # Keeps the interpreter's lock: a read is thousands of these, of a microsecond each, and getting it back may take milliseconds.
            self._copy = ctypes.PyDLL(path).cudaMemcpyAsync
        except OSError as error:
            raise TransferError(f"CUDA's libraries cannot be loaded: {error}") from error
        self._copy.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
        self._runtime.cudaGetErrorString.restype = c_char_p
        for name, arguments in SIGNATURES.items():
            getattr(self._runtime, name).argtypes = arguments
        self._range = self._driver.cuMemGetAddressRange_v2
        self._range.argtypes = [c_void_p, c_void_p, c_uint64]

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make it this thread's device meanwhile."""
        before = c_int()
        self._call("cudaGetDevice", byref(before))
        self._call("cudaSetDevice", device)
        try:
            yield
        finally:
            self._call("cudaSetDevice", before.value)

    def export(self, address: int) -> tuple[bytes, int]:
        """The handle of the allocation in which an address of this thread's device lies, and the address's offset in it."""
        self._call("cudaFree", None)  # makes the device's context if it is not there
        base, _ = self.allocation(address)
        handle = Handle()
        self._call("cudaIpcGetMemHandle", byref(handle), base)
        return bytes(handle), address - base

    def allocation(self, address: int) -> tuple[int, int]:
        """Where the allocation begins in which an address of this thread's device lies, and its size."""
        base, size = c_uint64(), c_size_t()
        if code := self._range(byref(base), byref(size), address):
            raise TransferError(f"CUDA knows of no allocation there (error {code})")
        return base.value, size.value

    def open(self, handle: bytes) -> int:
        """Another process's allocation, mapped for this thread's device; on another GPU, access to it is enabled."""
        address = c_void_p()
        self._call("cudaIpcOpenMemHandle", byref(address), Handle.from_buffer_copy(handle), IPC_LAZY_ENABLE_PEER_ACCESS)
        assert address.value is not None
        return address.value

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    @contextlib.contextmanager
    def stream(self) -> "Iterator[Stream]":
        """A stream of its own on this thread's device; what was put on it has ended when this ends, in whatever way."""
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

    def _check(self, code: int, name: str) -> None:
        if code:
            self._runtime.cudaGetLastError()
            raise TransferError(f"{name}: {self._runtime.cudaGetErrorString(code).decode()} (error {code})")


class Stream:
    def __init__(self, cuda: Cuda, stream: c_void_p, event: c_void_p) -> None:
        self._cuda, self._stream, self._event = cuda, stream, event

    def copy(self, to: int, source: int, size: int) -> None:
        """Between two places in device memory, of one GPU or two; does not wait."""
        self._cuda._check(self._cuda._copy(to, source, size, COPY_KIND_BY_POINTERS, self._stream), "cudaMemcpyAsync")

    def wait(self) -> None:
        """Until everything put here has ended; the thread sleeps."""
        self._cuda._call("cudaEventRecord", self._event, self._stream)
        self._cuda._call("cudaEventSynchronize", self._event)


def _library() -> str:
    """The CUDA runtime that is loaded already, else the system's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libcudart.so"):
            return path[0]
    found = ctypes.util.find_library("cudart")
    if found is None:
        raise TransferError("the CUDA runtime is not on this machine")
    return found
