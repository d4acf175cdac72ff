"""Length-prefixed frames, which delimit messages on a byte stream.

Replicas use them among themselves, and a process uses them to talk to its workers.

A frame is a big-endian 32-bit header, the payload's size with one bit that marks a failure, and then the payload.
"""

import struct
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
"""Limit between a process and its own workers."""
_HEADER = struct.Struct(">I")
_FAILED = 1 << 31


class Frame(NamedTuple):
    payload: bytes
    failed: bool
    """Whether the payload describes an error."""


def frame(payload: bytes = b"", *, failed: bool = False) -> bytes:
    """Return the bytes of one frame. Raises ValueError for a payload of 2 GiB or more."""
    if len(payload) >= _FAILED:
        raise ValueError(f"a frame cannot hold {len(payload)} bytes")
    return _HEADER.pack(len(payload) | (_FAILED if failed else 0)) + payload


def packed(message: Any) -> bytes:
    """Return a frame that holds `message` as msgpack."""
    return frame(msgspec.msgpack.encode(message))


def size_of(header: bytes, max_bytes: int = MAX_FRAME_BYTES) -> tuple[int, bool]:
    """Return the size of a payload, and whether it describes an error.

    Raises ValueError if the payload exceeds `max_bytes`.
    """
    (value,) = _HEADER.unpack(header)
    size = value & ~_FAILED
    if size > max_bytes:
        raise ValueError(f"a frame of {size} bytes; the maximum is {max_bytes}")
    return size, bool(value & _FAILED)


def read_payload(read_exactly: Callable[[int], bytes]) -> bytes:
    """Read one frame by a function that returns exactly as many bytes as it is asked for. Raises ValueError."""
    size, _ = size_of(read_exactly(HEADER_BYTES))
    return read_exactly(size)


async def receive_payload(read_exactly: Callable[[int], Awaitable[bytes]]) -> bytes:
    """Read one frame, like `read_payload`."""
    size, _ = size_of(await read_exactly(HEADER_BYTES))
    return await read_exactly(size)


class FrameReader:
    """Assembles frames from chunks of a stream. Raises ValueError for a payload of more than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """Yield the frames that `chunk` completes."""
        self._buffer += chunk
        while len(self._buffer) >= HEADER_BYTES:
            size, failed = size_of(bytes(self._buffer[:HEADER_BYTES]), self._max_bytes)
            end = HEADER_BYTES + size
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield Frame(payload, failed)
