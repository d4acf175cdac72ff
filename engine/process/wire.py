"""The messages between a client and a host: msgpack over one ZMQ socket on each side.

Either side sends batches: everything that became ready in one pass of its event loop, in order. A client numbers its
connections; the number, called *generation*, is part of each batch, so that a message for a host that has died never
reaches its successor.

Large buffers of a call's argument are frames behind the batch, or memory that the host opens for itself. Arguments,
results and reports are encoded by the service's own types (`engine/process/service.py`) and embedded as raw msgpack.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

import msgspec

import engine.errors
from engine.kit.logs import LogOptions
from engine.process.sockets import Buffer
from engine.transfer.base import TransferError
from engine.transfer.shared_bytes import Data, Reference, SharedBytes, opened, readable

MAX_MESSAGE_BYTES = 256 << 20
BEAT_SECONDS = 0.25
"""Interval of a host's heartbeats."""
PARENT_BEAT_SECONDS = 1.0
"""Interval of heartbeats to its parent."""
SILENCE_SECONDS = 5.0
"""Silence after which a client considers its host stuck: short enough that another replica can answer within ten
seconds."""
Standby = Literal["", "imports", "model"]
"""Preparation of a standby host: none, importing code, or loading the model too."""
_OVERHEAD = 256
"""Upper bound for the bytes that a part adds to its batch."""

# Parent to host, as JSON.


class HostOptions(msgspec.Struct, frozen=True):
    config: msgspec.Raw
    """Configuration of the service, as JSON."""
    address: str
    """ipc:// or tcp://127.0.0.1"""
    logs: LogOptions = LogOptions()
    standby: Standby = ""
    """Preparation before the host writes `standby` and waits for the line `go`; empty to serve at once."""


# Client to host.


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message of a connection, answered by Accepted.

    The host opens `sample` to find out whether memory can be shared.
    """

    sample: Reference


class Call(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Begin a call. `key` is a number of the client's choice that identifies the call from here on."""

    key: int
    method: str
    argument: msgspec.Raw
    parts: int = 0
    """Number of buffers detached from the argument."""
    shared: dict[int, Reference] = {}
    """Parts sent as references instead of frames. The client keeps them open until the call has ended."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    key: int


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Report on `topic` from its beginning, for as long as the connection lasts."""

    topic: str


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Last message of a connection: the host cancels the client's remaining calls."""


Command = Hello | Call | Cancel | Subscribe | Goodbye

# Host to client.


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=0):
    info: msgspec.Raw
    shares: bool
    """Whether the host could open the sample."""


class Output(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A result of a call."""

    key: int
    result: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The call ended with an error from `engine/errors.py`, named by its class."""

    key: int
    kind: str
    message: str
    param: str | None


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Heartbeat, with the health of the service."""

    healthy: bool


class News(msgspec.Struct, frozen=True, array_like=True, tag=4):
    topic: str
    report: msgspec.Raw


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The client did not read for too long and the host cancelled its calls: the client must say Hello again."""


Reply = Accepted | Output | Failed | Beat | News | Dropped


class Commands(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    commands: list[Command]


class Replies(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    replies: list[Reply]


encode = msgspec.msgpack.Encoder().encode
_decode_commands = msgspec.msgpack.Decoder(Commands).decode
decode_replies = msgspec.msgpack.Decoder(Replies).decode

_ERRORS = {
    cls.__name__: cls
    for cls in vars(engine.errors).values()
    if isinstance(cls, type) and issubclass(cls, engine.errors.EngineError)
}


def call(key: int, method: str, argument: bytes, parts: Sequence[Data], shares: bool) -> tuple[Call, list[Buffer]]:
    """Return a call and the frames that follow it. `shares` says whether the host can open shared memory."""
    shared = {index: part.reference for index, part in enumerate(parts) if shares and isinstance(part, SharedBytes)}
    frames = [readable(part) for index, part in enumerate(parts) if index not in shared]
    return Call(key, method, msgspec.Raw(argument), len(parts), shared), frames


def largest(command: Call, frames: Sequence[Buffer]) -> int:
    """Return an upper bound for the bytes that a call takes in a message."""
    return _OVERHEAD + len(command.argument) + _OVERHEAD * command.parts + sum(map(len, frames))


def unpack(frames: Sequence[bytes]) -> tuple[int, list[tuple[Command, list[bytes]]]]:
    """Return the generation of a batch and its commands, each with the frames that belong to it.

    Raises ValueError for a malformed batch.
    """
    batch, rest = _decode_commands(frames[0]), iter(frames[1:])
    commands = [(command, list(_frames_of(command, rest))) for command in batch.commands]
    if more := len(list(rest)):
        raise ValueError(f"{more} frames belong to nothing")
    return batch.generation, commands


def _frames_of(command: Command, rest: Iterator[bytes]) -> Iterator[bytes]:
    if not isinstance(command, Call):
        return
    count = command.parts - len(command.shared)
    found = list(islice(rest, max(0, count)))
    if len(found) != count:
        raise ValueError(f"{count} frames are missing or too many are shared")
    yield from found


def parts_of(command: Call, frames: Sequence[bytes]) -> list[Data]:
    """Return the parts of a call's argument in order.

    Raises TransferError and OSError for shared memory that cannot be opened, and ValueError for references to parts
    that do not exist.
    """
    if any(index not in range(command.parts) for index in command.shared):
        raise ValueError("a reference belongs to no part")
    rest = iter(frames)
    return [opened(command.shared[index]) if index in command.shared else next(rest) for index in range(command.parts)]


def can_open(reference: Reference) -> bool:
    try:
        return bool(opened(reference))
    except (TransferError, OSError):
        return False


def failed(key: int, error: engine.errors.EngineError) -> Failed:
    param = error.param if isinstance(error, engine.errors.InvalidRequest) else None
    return Failed(key, type(error).__name__, str(error), param)


def error_of(report: Failed) -> engine.errors.EngineError:
    """Return the error that `failed` described; EngineFailure if this side does not know its kind."""
    cls = _ERRORS.get(report.kind, engine.errors.EngineFailure)
    if issubclass(cls, engine.errors.InvalidRequest):
        return cls(report.message, report.param)
    return cls(report.message)
