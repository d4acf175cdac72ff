"""An engine that lives in another process: the `Engine` that talks to `engine/process/host`. It outlives its host and finds the next one."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from engine.errors import EngineDied, EngineFailure, EngineNotReady, InvalidRequest
from engine.kit.stream import DeltaStream, EventFeed, Latest
from engine.kv_events import KvEvent
from engine.process import wire
from engine.process.attachments import data_of
from engine.stats import IterationStats
from engine.transfer.shared_bytes import SharedBytes
from engine.types import EngineInfo, GenerateRequest

_RECONNECT_MS = 50


class EngineClient:
    """The engine served at `address` (ipc:// or tcp://).

    When the host goes, running requests raise EngineDied, and new ones EngineNotReady until a host is back. `failed` returns a reason
    once it is known that no host will ever come (`EngineProcess.wait_failed`); without it, `start` waits as long as it takes.
    """

    def __init__(self, address: str, failed: Callable[[], Awaitable[str]] | None = None) -> None:
        self._address = address
        self._failed = failed
        self._link: _Link | None = None
        self._ready = asyncio.Event()
        self._info: EngineInfo | None = None
        self._engine_healthy = False
        self._shares = False
        self._sample = SharedBytes.of(b"\0")
        """For the host to try whether it can open such."""
        self._heard = 0.0
        self._generation = 0
        self._keys = itertools.count()
        self._running: dict[int, _Running] = {}
        self._outbox: list[wire.Command] = []
        self._topics: set[wire.Topic] = set()
        self._stats: Latest[IterationStats] = Latest()
        self._events: EventFeed[KvEvent] = EventFeed()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineNotReady("the engine has not started")
        return self._info

    @property
    def healthy(self) -> bool:
        return self._ready.is_set() and self._engine_healthy and time.monotonic() - self._heard < wire.SILENCE_SECONDS

    async def start(self) -> None:
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

    def generate(self, request: GenerateRequest) -> DeltaStream:
        if not self._ready.is_set():
            return DeltaStream.failed(EngineNotReady("the engine is starting, restarting or closing"))
        if wire.largest(request, self._shares) > wire.MAX_MESSAGE_BYTES:
            return DeltaStream.failed(InvalidRequest("the prompt, images included, is too large", "prompt"))
        key = next(self._keys)
        stream = DeltaStream(lambda: self._abort(key))
        self._running[key] = _Running(stream, [part for part in data_of(request) if isinstance(part, SharedBytes)])
        self._send(wire.Generate(key, request))
        return stream

    async def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        self._subscribe("kv_events")
        async with aclosing(self._events.batches()) as batches:
            async for events in batches:
                yield events

    def stats(self) -> AsyncIterator[IterationStats]:
        self._subscribe("stats")
        return self._stats.values()

    async def close(self) -> None:
        if self._ready.is_set():
            self._outbox.append(wire.Goodbye())
            self._flush()
        self._ready.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._fail_all(EngineNotReady("the engine is closing"))
        self._stats.close()
        self._events.close()

    def _abort(self, key: int) -> None:
        if self._running.pop(key, None) is not None and self._ready.is_set():
            self._send(wire.Abort(key))

    def _subscribe(self, topic: wire.Topic) -> None:
        """Subscribe from now on, and again at each new host. Once more is no harm: the host begins anew."""
        self._topics.add(topic)
        if self._ready.is_set():
            self._send(wire.Subscribe(topic))

    def _send(self, command: wire.Command) -> None:
        """Send with all else of this turn of the loop."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        """Send the outbox; the commands in it are void if the host they were meant for has gone."""
        commands, self._outbox = self._outbox, []
        if not commands or self._link is None:
            return
        frames = wire.pack(self._generation, commands, self._shares)
        if len(frames[0]) <= wire.MAX_MESSAGE_BYTES:
            self._link.send(frames)
        else:
            for command in commands:
                self._link.send(wire.pack(self._generation, [command], self._shares))

    def _greet(self) -> None:
        """A host has accepted the connection: introduce ourselves."""
        self._generation += 1
        self._outbox = [wire.Hello(self._sample.reference), *map(wire.Subscribe, self._topics)]
        self._flush()

    def _lose(self) -> None:
        """The host has gone: end all that runs there."""
        self._ready.clear()
        self._outbox.clear()
        self._fail_all(EngineDied("the engine process was lost while the request ran"))

    def _fail_all(self, error: EngineDied | EngineNotReady) -> None:
        running, self._running = self._running, {}
        for request in running.values():
            request.stream.fail(error)

    def _receive(self, frames: list[bytes]) -> None:
        batch = wire.decode_reports(frames[-1])
        if batch.generation != self._generation:
            return
        self._heard = time.monotonic()
        for report in batch.reports:
            if isinstance(report, wire.Output):
                running = self._running.get(report.key)
                if running is not None:
                    running.stream.put(report.delta)
                    if report.delta.finish_reason is not None:
                        del self._running[report.key]
            else:
                self._note(report)

    def _note(self, report: wire.Report) -> None:
        match report:
            case wire.Failed():
                running = self._running.pop(report.key, None)
                if running is not None:
                    running.stream.fail(wire.error_of(report))
            case wire.Welcome():
                self._info, self._shares = report.info, report.shares
                self._engine_healthy = True
                self._ready.set()
            case wire.Beat():
                self._engine_healthy = report.healthy
            case wire.Stats():
                self._stats.publish(report.stats)
            case wire.KvEvents():
                for event in report.events:
                    self._events.put(event)
            case wire.Dropped():
                self._lose()
                self._greet()


class _Running(NamedTuple):
    """A request that the host has, and what it has to open of ours, which stays open here until the request has ended."""

    stream: DeltaStream
    shared: list[SharedBytes]


class _Link:
    """A DEALER socket that connects, and connects again, to `address`, and says when the other side comes and goes."""

    def __init__(
        self,
        address: str,
        on_connect: Callable[[], None],
        on_message: Callable[[list[bytes]], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._dealer: zmq.Socket[bytes] = wire.context().socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._dealer.setsockopt(zmq.SNDHWM, 0)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        monitor = self._dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket = wire.LoopSocket(self._dealer, on_message)
        self._monitor = wire.LoopSocket(monitor, self._observe)
        self._dealer.connect(address)

    def send(self, frames: Sequence[wire.Buffer]) -> None:
        self._socket.send(frames)

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close()
        self._socket.close(linger_ms=100)

    def _observe(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_connect()
        else:
            self._socket.drain()  # what the host said last is true still
            self._on_disconnect()
