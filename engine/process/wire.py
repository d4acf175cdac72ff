"""What `engine/process/client` and `engine/process/host` say to each other: msgpack over one ZMQ socket on each side. The bytes of images are frames of
their own behind it, or in memory that the host opens for itself.

Either side sends a batch: all that became ready in one turn of its loop, in order. The client counts its connections, its
*generation*, and each batch carries the number, so that nothing meant for a host that has gone reaches the one after it.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import zmq

import engine.errors
from engine.config import EngineConfig
from engine.kv_events import KvEvent
from engine.process.attachments import attach, data_of, detach
from engine.stats import IterationStats
from engine.transfer.base import TransferError
from engine.transfer.shared_bytes import Data, Reference, SharedBytes, opened, readable
from engine.types import Delta, EngineInfo, GenerateRequest

Topic = Literal["stats", "kv_events"]
Buffer: TypeAlias = bytes | memoryview
"""What a frame is sent from."""

MAX_MESSAGE_BYTES = 256 << 20
BEAT_SECONDS = 0.25
"""Pause between the signs of life that a host sends."""
SILENCE_SECONDS = 5.0
"""Silence after which a client takes its host for stuck: soon enough for another replica to answer within ten seconds."""
_LARGE = 1 << 16
"""Bytes of a frame that is sent without being copied."""
_BURST = 256
"""Messages read before other work gets its turn."""

# Parent to host, as JSON.


class HostOptions(msgspec.Struct, frozen=True):
    config: EngineConfig
    address: str
    """ipc:// or tcp://127.0.0.1"""
    log_level: str = "info"


# Client to host.


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first message of a connection: answered by Welcome. `sample` is to be opened, to see whether that can be done here."""

    sample: Reference


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Begin a request, known by a number of the client's own from here on. It comes as `engine/process/attachments.py: detach` leaves it."""

    key: int
    request: GenerateRequest
    shared: dict[int, Reference] = {}
    """Which of its parts come as these, and not as frames. The client keeps them open until the request has ended."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    key: int


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Report on `topic` from the beginning, for as long as the connection lasts."""

    topic: Topic


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The last message of a connection: whatever still runs for it is aborted."""


class Unopened(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """What `unpack` makes of a Generate whose images it cannot open. Nobody sends it."""

    key: int
    reason: str


Command = Hello | Generate | Abort | Subscribe | Goodbye | Unopened

# Host to client.


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=0):
    info: EngineInfo
    shares: bool
    """Whether the sample could be opened."""


class Output(msgspec.Struct, frozen=True, array_like=True, tag=1):
    key: int
    delta: Delta


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The request ended with an error of `engine/errors`, by class name."""

    key: int
    kind: str
    message: str
    param: str | None


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A sign of life, and whether the engine is healthy."""

    healthy: bool


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=4):
    stats: IterationStats


class KvEvents(msgspec.Struct, frozen=True, array_like=True, tag=5):
    events: list[KvEvent]


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The host could not reach the client for a while and has aborted its requests: say Hello again."""


Report = Welcome | Output | Failed | Beat | Stats | KvEvents | Dropped


class Commands(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    commands: list[Command]


class Reports(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    reports: list[Report]


encode = msgspec.msgpack.Encoder().encode
_decode_commands = msgspec.msgpack.Decoder(Commands).decode
decode_reports = msgspec.msgpack.Decoder(Reports).decode

_ERRORS = {
    cls.__name__: cls
    for cls in vars(engine.errors).values()
    if isinstance(cls, type) and issubclass(cls, engine.errors.EngineError)
}


def pack(generation: int, commands: Sequence[Command], shares: bool = False) -> list[Buffer]:
    """A batch of commands as frames. `shares`: whether the host opens what is shared."""
    bare: list[Command] = []
    frames: list[Buffer] = []
    for command in commands:
        if isinstance(command, Generate):
            request, parts = detach(command.request)
            shared = {
                index: part.reference for index, part in enumerate(parts) if shares and isinstance(part, SharedBytes)
            }
            frames += [readable(part) for index, part in enumerate(parts) if index not in shared]
            command = Generate(command.key, request, shared)
        bare.append(command)
    return [encode(Commands(generation, bare)), *frames]


def unpack(frames: Sequence[bytes]) -> Commands:
    """Raises ValueError, as msgspec's errors are, for what `pack` has not made."""
    batch, rest = _decode_commands(frames[0]), iter(frames[1:])
    commands: list[Command] = []
    for command in batch.commands:
        if isinstance(command, Generate):
            needed = [index for index in range(len(data_of(command.request))) if index not in command.shared]
            parts: dict[int, Data] = dict(zip(needed, rest, strict=False))
            try:
                parts |= {index: opened(reference) for index, reference in command.shared.items()}
                command = Generate(command.key, attach(command.request, [parts[index] for index in sorted(parts)]))
            except (TransferError, OSError) as error:
                command = Unopened(command.key, str(error))
        commands.append(command)
    if more := len(list(rest)):
        raise ValueError(f"{more} frames belong to nothing")
    return Commands(batch.generation, commands)


def can_open(reference: Reference) -> bool:
    try:
        return bool(opened(reference))
    except (TransferError, OSError):
        return False


def largest(request: GenerateRequest, shares: bool) -> int:
    """No fewer bytes than the prompt of a request takes in a message."""
    sizes = (256 + (0 if shares and isinstance(data, SharedBytes) else len(data)) for data in data_of(request))
    return 5 * len(request.prompt_token_ids) + sum(sizes)


def failed(key: int, error: engine.errors.EngineError) -> Failed:
    param = error.param if isinstance(error, engine.errors.InvalidRequest) else None
    return Failed(key, type(error).__name__, str(error), param)


def error_of(report: Failed) -> engine.errors.EngineError:
    """The error that `failed` described; EngineFailure if this side does not know its kind."""
    cls = _ERRORS.get(report.kind, engine.errors.EngineFailure)
    if issubclass(cls, engine.errors.InvalidRequest):
        return cls(report.message, report.param)
    return cls(report.message)


def remove_socket_file(address: str) -> None:
    """Remove what binding an ipc:// address left behind; ZMQ does not."""
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def context() -> "zmq.Context[Any]":
    """This process's ZMQ context.

    It is never terminated: libzmq 4.3.5 can wait there for ever, without linger too, if both ends of a connection close at once while
    messages wait (about one close in a hundred on a busy machine; zeromq/libzmq issue 2586).
    """
    return zmq.Context.instance()


class LoopSocket:
    """A ZMQ socket on the running event loop: `on_message` gets the frames of each message; nothing here blocks.

    ZMQ's descriptor only signals that something has changed, not that something waits. Every send may swallow that signal, so the
    socket is looked at again after each.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._loop.add_reader(self._fd, self.drain)
        self._loop.call_soon(self.drain)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Raises zmq.Again if the peer's queue is full, zmq.ZMQError(EHOSTUNREACH) if it has gone (on a mandatory router)."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=max(map(len, frames)) < _LARGE)
        finally:
            if self._readable():
                self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Read what waits."""
        for _ in range(_BURST):
            if not self._readable():
                return
            self._on_message(self._socket.recv_multipart(zmq.NOBLOCK))
        self._loop.call_soon(self.drain)

    def close(self, linger_ms: int = 0) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)

    def _readable(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
