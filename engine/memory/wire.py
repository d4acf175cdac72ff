"""The messages between an engine and the memory service: msgpack, one per packet of a Unix socket.

A connection holds at most one lease, and the lease ends with it. The engine asks for memory by what it would write
there. The service answers with memory that is complete, or with new memory for this engine to fill, or it refuses;
while another engine fills that memory, the answer waits.
"""

import os
import socket
from typing import TypeAlias

import msgspec

VERSION = 1
"""Both sides have the same, or the service refuses."""
_MAX_BYTES = 1 << 16


class Acquire(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Ask for a lease of memory. Equal keys mean equal contents."""

    version: int
    size: int
    device: str
    """The UUID of a GPU; empty for memory of the host."""
    layout: str
    """Properties that determine the contents in addition to the weights: data type, quantisation, order."""
    files: bytes
    """Digest of the names, sizes and times of the weights' files."""
    weights: bytes = b""
    """Digest of their contents; empty if the service may know it from an earlier engine by `files`."""


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The memory is filled, and nothing of this process can write to it any more."""


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ask for a Status."""

    version: int


class Unknown(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The service does not know the contents of these files: ask again, with the digest."""


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The memory is complete and comes as a descriptor, except in answer to a Commit."""


class Fill(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The memory is new and comes as a descriptor; a Commit must follow."""


class Wait(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Another engine fills this memory; another answer follows when it has."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    reason: str


class OwnedMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory that the service owns."""

    key: str
    device: str
    size: int
    leases: int
    ready: bool
    """Whether it has been filled."""
    waiting: int
    """Engines that wait for that."""


class Status(msgspec.Struct, frozen=True, array_like=True, tag=4):
    owned: list[OwnedMemory]
    limit: int
    """Bytes; 0 is no limit."""
    granted: int
    """Leases of memory that was there already, since the start."""
    filled: int
    refused: int
    freed: int


Request: TypeAlias = Acquire | Commit | AskStatus
Answer: TypeAlias = Unknown | Granted | Fill | Wait | Refused | Status
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class MemoryServiceError(Exception):
    """The service gave no memory; the message says why."""


def unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def send(to: socket.socket, message: Request | Answer, *fds: int) -> None:
    """Send a message, with descriptors. Raises OSError."""
    socket.send_fds(to, [msgspec.msgpack.encode(message)], fds)


def receive_request(connection: socket.socket) -> Request | None:
    """Return the next request; None at the end of the connection. Raises OSError, and ValueError for a malformed one.
    Descriptors that came with it are closed by the system."""
    packet = connection.recv(_MAX_BYTES)
    return _decode_request(packet) if packet else None


def receive_answer(connection: socket.socket) -> tuple[Answer, list[int]]:
    """Return the next answer and its descriptors. Raises OSError and MemoryServiceError."""
    packet, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not packet:
            raise MemoryServiceError("it has closed the connection")
        return _decode_answer(packet), fds
    except (MemoryServiceError, msgspec.DecodeError) as error:
        for fd in fds:
            os.close(fd)
        raise (
            error
            if isinstance(error, MemoryServiceError)
            else MemoryServiceError(f"its answer cannot be read: {error}")
        ) from error
