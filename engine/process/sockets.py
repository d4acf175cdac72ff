"""Ports, and ZMQ sockets on the event loop. The publisher of KV-cache events uses them too."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import zmq

Buffer: TypeAlias = bytes | memoryview

# Integers: with ZMQ's own flags each operation makes an object of an enumeration, for every token of every stream.
_NOBLOCK, _MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)
_LARGE = 1 << 16
"""Bytes of a frame that is sent without being copied."""
_BURST = 256
"""Messages read before other tasks run."""


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def context() -> "zmq.Context[Any]":
    """Return the ZMQ context of this process.

    It is never terminated: libzmq 4.3.5 can block forever in that call, even without linger, if both ends of a
    connection close at once while messages are queued (about one close in a hundred on a busy machine; zeromq/libzmq
    issue 2586).
    """
    return zmq.Context.instance()


def remove_socket_file(address: str) -> None:
    """Remove the file that binding an ipc:// address created; ZMQ leaves it behind."""
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


class LoopSocket:
    """A ZMQ socket on the running event loop. `on_message` gets the frames of each message; no method blocks.

    The descriptor of a ZMQ socket signals that the socket's state has changed, not that a message is ready, and any
    send may consume the signal. The socket is therefore polled again after each send.
    """

    def __init__(self, zmq_socket: "zmq.Socket[bytes]", on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = zmq_socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = zmq_socket.fileno()
        self._loop.add_reader(self._fd, self.drain)
        self._loop.call_soon(self.drain)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send one message.

        Raises zmq.Again if the receiver's queue is full, and zmq.ZMQError(EHOSTUNREACH) if the receiver has gone (on a
        mandatory router).
        """
        *others, last = frames
        try:
            for frame in others:
                self._socket.send(frame, _MORE, copy=len(frame) < _LARGE)
            self._socket.send(last, _NOBLOCK, copy=len(last) < _LARGE)
        finally:
            if self._readable():
                self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Read the messages that are ready."""
        for _ in range(_BURST):
            if not self._readable():
                return
            self._on_message(self._received())
        self._loop.call_soon(self.drain)

    def close(self, linger_ms: int = 0) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)

    def _readable(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def _received(self) -> list[bytes]:
        """Return the frames of a message that is ready."""
        frames = []
        while True:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            frames.append(frame.bytes)
            if not frame.more:
                return frames
