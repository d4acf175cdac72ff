"""Clients of services that run in another process (`engine/process/host.py`).

A client outlives its host and finds the next one.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from engine.base import DeltaStream, EventFeed, Latest
from engine.config import Tag
from engine.errors import EngineDied, EngineError, EngineFailure, EngineNotReady, InvalidRequest
from engine.kv_events import KvEvent
from engine.process import wire
from engine.process.engine_service import ENGINE
from engine.process.service import Interface
from engine.process.sockets import Buffer, LoopSocket, context
from engine.sleep import TAGS, SleepOrder, SleepState
from engine.stats import IterationStats
from engine.transfer.shared_bytes import SharedBytes
from engine.types import EngineInfo, GenerateRequest, NextHandoff

_RECONNECT_MS = 50
InfoT = TypeVar("InfoT")


class _Running(NamedTuple):
    """A call that the host has accepted, and the shared memory that stays open until the call has ended."""

    decode: Callable[[bytes], Any]
    put: Callable[[Any], object]
    fail: Callable[[Exception], object]
    shared: list[SharedBytes]


class ServiceClient(Generic[InfoT]):
    """The service that is hosted at `address` (ipc:// or tcp://).

    When the host dies, running calls raise EngineDied, and new ones raise EngineNotReady until a host is back. `failed`
    returns a reason once no host will ever come (`ServiceProcess.wait_failed`); without it, `start` waits as long as it
    takes.
    """

    def __init__(
        self, interface: Interface[Any, Any], address: str, failed: Callable[[], Awaitable[str]] | None = None
    ) -> None:
        self._interface = interface
        self._address = address
        self._failed = failed
        self._link: _Link | None = None
        self._ready = asyncio.Event()
        self._info: InfoT | None = None
        self._service_healthy = False
        self.shares_memory = False
        """Whether the host can open memory of this process."""
        self._sample = SharedBytes.of(b"\0")
        self._heard = 0.0
        self._generation = 0
        self._keys = itertools.count()
        self._running: dict[int, _Running] = {}
        self._outbox: list[tuple[wire.Command, list[Buffer]]] = []
        self._topics: dict[str, Callable[[Any], object]] = {}

    @property
    def info(self) -> InfoT:
        if self._info is None:
            raise EngineNotReady(f"the {self._interface.noun} has not started")
        return self._info

    @property
    def healthy(self) -> bool:
        return self._ready.is_set() and self._service_healthy and time.monotonic() - self._heard < wire.SILENCE_SECONDS

    async def start(self) -> None:
        """Connect, and wait until a host answers."""
        self._loop = asyncio.get_running_loop()
        self._link = _Link(self._address, self._greet, self._receive, self._lose)
        ready = asyncio.ensure_future(self._ready.wait())
        failed = asyncio.ensure_future(self._failed()) if self._failed is not None else None
        try:
            await asyncio.wait([ready] if failed is None else [ready, failed], return_when=asyncio.FIRST_COMPLETED)
            if failed is not None and failed.done():
                raise EngineFailure(failed.result())
        except BaseException:  # cancellation included: a failed start leaves nothing running
            await self.close()
            raise
        finally:
            ready.cancel()
            if failed is not None:
                failed.cancel()

    async def call(self, method: str, argument: Any) -> Any:
        """Return the one result of a call. Raises EngineError; cancelling cancels the call."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def settle(settle_future: Callable[[Any], None], value: Any) -> None:
            if not done.done():
                settle_future(value)

        key = self.begin(method, argument, partial(settle, done.set_result), partial(settle, done.set_exception))
        try:
            return await done
        finally:
            self.end(key, cancel=done.cancelled())

    def begin(
        self, method: str, argument: Any, put: Callable[[Any], object], fail: Callable[[Exception], object]
    ) -> int:
        """Begin a call and return its key.

        `put` receives each result, `fail` the error if it ends with one; `end` must follow.

        Raises EngineNotReady and InvalidRequest.
        """
        if not self._ready.is_set():
            raise EngineNotReady(f"the {self._interface.noun} is starting, restarting or closing")
        found = self._interface.methods[method]
        bare, parts = found.detach(argument)
        key = next(self._keys)
        command, frames = wire.call(key, method, wire.encode(bare), parts, self.shares_memory)
        if wire.largest(command, frames) > wire.MAX_MESSAGE_BYTES:
            raise InvalidRequest(found.too_large, found.parameter)
        shared = [part for part in parts if isinstance(part, SharedBytes)]
        self._running[key] = _Running(found.decode_result, put, fail, shared)
        self._send(command, frames)
        return key

    def end(self, key: int, *, cancel: bool) -> None:
        """Forget a call that has ended, or cancel it. Idempotent."""
        if self._running.pop(key, None) is not None and cancel and self._ready.is_set():
            self._send(wire.Cancel(key))

    def subscribe(self, topic: str, put: Callable[[Any], object]) -> None:
        """Have `put` called with each report on `topic`, from now on and again from the beginning at each new host."""
        self._topics[topic] = put
        if self._ready.is_set():
            self._send(wire.Subscribe(topic))

    async def close(self) -> None:
        if self._ready.is_set():
            self._outbox.append((wire.Goodbye(), []))
            self._flush()
        self._ready.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._fail_all(EngineNotReady(f"the {self._interface.noun} is closing"))

    def _send(self, command: wire.Command, frames: Sequence[Buffer] = ()) -> None:
        """Send together with all other commands of this pass of the loop."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append((command, [*frames]))

    def _flush(self) -> None:
        """Send the outbox; its commands are void if their host has died meanwhile."""
        outbox, self._outbox = self._outbox, []
        if not outbox or self._link is None:
            return
        batch = wire.encode(wire.Commands(self._generation, [command for command, _ in outbox]))
        if len(batch) <= wire.MAX_MESSAGE_BYTES:
            self._link.send([batch, *(frame for _, frames in outbox for frame in frames)])
            return
        for command, frames in outbox:
            self._link.send([wire.encode(wire.Commands(self._generation, [command])), *frames])

    def _greet(self) -> None:
        """Introduce this client to a host that has accepted the connection."""
        self._generation += 1
        self._outbox = [
            (wire.Hello(self._sample.reference), []),
            *((wire.Subscribe(name), []) for name in self._topics),
        ]
        self._flush()

    def _lose(self, how: str = "was lost while the request ran") -> None:
        """End the calls of a host that has gone or has dropped this client, with EngineDied."""
        self._ready.clear()
        self._outbox.clear()
        self._fail_all(EngineDied(f"the {self._interface.noun} process {how}"))

    def _fail_all(self, error: EngineError) -> None:
        running, self._running = self._running, {}
        for call in running.values():
            call.fail(error)

    def _receive(self, frames: list[bytes]) -> None:
        batch = wire.decode_replies(frames[-1])
        if batch.generation != self._generation:
            return
        self._heard = time.monotonic()
        for reply in batch.replies:
            if isinstance(reply, wire.Output):
                running = self._running.get(reply.key)
                if running is not None:
                    running.put(running.decode(reply.result))
            else:
                self._note(reply)

    def _note(self, reply: wire.Reply) -> None:
        match reply:
            case wire.Failed():
                running = self._running.pop(reply.key, None)
                if running is not None:
                    running.fail(wire.error_of(reply))
            case wire.Accepted():
                self._info = msgspec.msgpack.decode(reply.info, type=self._interface.info)
                self.shares_memory = reply.shares
                self._service_healthy = True
                self._ready.set()
            case wire.Beat():
                self._service_healthy = reply.healthy
            case wire.News():
                self._topics[reply.topic](self._interface.topics[reply.topic].decode(reply.report))
            case wire.Dropped():
                self._lose("cancelled the request: the server did not read its messages for too long")
                self._greet()


class EngineClient(ServiceClient[EngineInfo]):
    """An `Engine` that lives in another process."""

    def __init__(self, address: str, failed: Callable[[], Awaitable[str]] | None = None) -> None:
        super().__init__(ENGINE, address, failed)
        self._stats: Latest[IterationStats] = Latest()
        self._events: EventFeed[KvEvent] = EventFeed()
        self._sleep_states: Latest[SleepState] = Latest()

    def generate(self, request: GenerateRequest) -> DeltaStream:
        stream = DeltaStream(lambda: self.end(key, cancel=True))
        try:
            key = self.begin("generate", request, stream.put, stream.fail)
        except EngineError as error:
            return DeltaStream.failed(error)
        stream.when_done(lambda: self.end(key, cancel=False))
        return stream

    async def continue_handoff(self, following: NextHandoff) -> bool:
        taken: bool = await self.call("continue_handoff", following)
        return taken

    async def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        self.subscribe("kv_events", self._put_events)
        async with aclosing(self._events.batches()) as batches:
            async for events in batches:
                yield events

    def stats(self) -> AsyncIterator[IterationStats]:
        self.subscribe("stats", self._stats.publish)
        return self._stats.values()

    async def reset_prefix_cache(self) -> None:
        await self.call("reset_prefix_cache", True)

    async def sleep(self, order: SleepOrder) -> SleepState:
        state: SleepState = await self.call("sleep", order)
        return state

    async def wake_up(self, tags: tuple[Tag, ...] = TAGS) -> SleepState:
        state: SleepState = await self.call("wake_up", tags)
        return state

    def sleep_states(self) -> AsyncIterator[SleepState]:
        self.subscribe("sleep_states", self._sleep_states.publish)
        return self._sleep_states.values()

    async def start_profile(self) -> None:
        await self.call("start_profile", True)

    async def stop_profile(self, trace: str) -> None:
        await self.call("stop_profile", trace)

    def _put_events(self, events: list[KvEvent]) -> None:
        for event in events:
            self._events.put(event)

    async def close(self) -> None:
        await super().close()
        self._stats.close()
        self._events.close()
        self._sleep_states.close()


class _Link:
    """A DEALER socket that connects to `address`, reconnects, and reports connections and disconnections."""

    def __init__(
        self,
        address: str,
        on_connect: Callable[[], None],
        on_message: Callable[[list[bytes]], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._dealer: zmq.Socket[bytes] = context().socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._dealer.setsockopt(zmq.SNDHWM, 0)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        monitor = self._dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket = LoopSocket(self._dealer, on_message)
        self._monitor = LoopSocket(monitor, self._observe)
        self._dealer.connect(address)

    def send(self, frames: Sequence[Buffer]) -> None:
        self._socket.send(frames)

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close()
        self._socket.close(linger_ms=100)

    def _observe(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_connect()
        else:
            self._socket.drain()  # the host's last messages are still valid
            self._on_disconnect()
