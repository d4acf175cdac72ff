"""Services that can be hosted in a process of their own, and how their calls travel.

`engine/process/__init__.py` explains how to host a service.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from engine.transfer.shared_bytes import Data

A = TypeVar("A")
R = TypeVar("R")
ConfigT = TypeVar("ConfigT")
ServiceT = TypeVar("ServiceT", bound="HostedService")


class HostedService(Protocol):
    """An object with a life on one event loop: `start` once, then calls, then `close` once."""

    @property
    def info(self) -> Any:
        """Facts fixed at start, as a msgspec struct; each client receives them when it connects."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether a call made now would be served. The host process ends once this is false."""
        ...

    async def start(self) -> None:
        """Become ready. Raises EngineFailure if that is impossible."""
        ...

    async def close(self) -> None:
        """Abort running calls and free all resources."""
        ...


class Results(Protocol):
    """A stream of results, such as `engine.base.DeltaStream`."""

    def pipe(self, sink: Callable[[Any], object]) -> None:
        """Call `sink` with each result, and with an exception if the stream ends with one."""
        ...

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the stream has ended."""
        ...

    def close(self) -> None:
        """Abort the call. Idempotent."""
        ...


async def _prepare_nothing(service: Any) -> None:
    """Leave everything to `start`."""


def _no_parts(argument: Any) -> tuple[Any, list[Data]]:
    return argument, []


def _attach_nothing(argument: Any, parts: Sequence[Data]) -> Any:
    if parts:
        raise ValueError(f"{len(parts)} parts belong to nothing")
    return argument


@dataclass(frozen=True)
class Method(Generic[A, R]):
    """A call with one argument.

    `run(service, argument)` returns a coroutine of its one result, or a stream of results at once.
    """

    argument: type[A]
    result: type[R]
    run: Callable[[Any, A], Coroutine[Any, Any, R] | Results]
    detach: Callable[[A], tuple[A, list[Data]]] = _no_parts
    """Removes large buffers from the argument; they travel beside the message and are not copied."""
    attach: Callable[[A, Sequence[Data]], A] = _attach_nothing
    """Restores the buffers. Raises ValueError if they do not fit the argument."""
    too_large: str = "the request is too large"
    """Message of the InvalidRequest for an argument that exceeds `wire.MAX_MESSAGE_BYTES`."""
    parameter: str | None = None
    """Parameter that this error names."""

    @cached_property
    def decode_argument(self) -> Callable[[bytes], A]:
        return msgspec.msgpack.Decoder(self.argument).decode

    @cached_property
    def decode_result(self) -> Callable[[bytes], R]:
        return msgspec.msgpack.Decoder(self.result).decode


@dataclass(frozen=True)
class Topic(Generic[R]):
    """A series of reports that clients subscribe to: `run(service)` returns an async generator of them."""

    report: type[R]
    run: Callable[[Any], Any]
    pause_seconds: float = 0.0
    """Minimum time between two reports."""

    @cached_property
    def decode(self) -> Callable[[bytes], R]:
        return msgspec.msgpack.Decoder(self.report).decode


@dataclass(frozen=True)
class Interface(Generic[ConfigT, ServiceT]):
    """Description of a service: its creation, methods and topics. Host and client read the same object."""

    name: str
    """`package.module:NAME` of this object; the host process imports it."""
    noun: str
    """Name of the service in log lines and errors, such as "engine"."""
    config: Any
    """Type of the configuration, which travels as JSON."""
    create: Callable[[ConfigT], ServiceT]
    info: type
    """Type of `HostedService.info`."""
    methods: Mapping[str, Method[Any, Any]]
    topics: Mapping[str, Topic[Any]]
    anticipate: Callable[[str], None] = lambda _: None
    """Imports modules in a process that is spawned before its configuration is known; takes a hint at what that is."""
    preload: Callable[[ConfigT], None] = lambda _: None
    """Imports modules for `create` and `start` in a standby process, without taking device memory."""
    prepare: Callable[[ServiceT], Coroutine[Any, Any, None]] = _prepare_nothing
    """Loads the model in a standby process: all of `start` that is possible while another process serves."""
    successor: Callable[[ConfigT, ServiceT], ConfigT] = lambda config, _: config
    """Configuration of a standby process for a service that has started."""
    more_stop_seconds: Callable[[ConfigT], float] = lambda _: 0.0
    """Seconds that the service may take to close, beyond `STOP_SECONDS`."""
    hang_seconds: Callable[[ConfigT], float] = lambda _: 0.0
    """Seconds that the host's event loop may be blocked before the process is killed; 0 sets no limit."""
