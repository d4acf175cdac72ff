"""The engine's own process, `python -m engine.host`: serves one engine to any number of `engine/process/client`s over a local ZMQ socket.

Standard input starts with one line of JSON, a `wire.HostOptions`, and stays open for as long as the host shall live. One line `ready` on
standard output says that clients are served. SIGTERM and SIGINT do nothing: a service manager's go to the parent too, which still drains.
"""

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
import threading
import time
from contextlib import aclosing
from functools import partial
from typing import TextIO

import msgspec
import zmq

from engine.base import Engine
from engine.create import create_engine
from engine.errors import EngineError, EngineFailure, EngineUnavailable
from engine.kit.stream import DeltaStream
from engine.process import stdio, wire
from engine.types import Delta

STOP_SECONDS = 2.0
"""How long a host that was told to stop may take over it."""
_SWITCH_SECONDS = (
    0.0005  # how long the loop or the engine's thread keeps the interpreter from the other: a tenth of Python's default
)
_HIGH_WATER_MARK = 4096  # batches that may wait for a client before it counts as stuck
_STATS_SECONDS = 0.1
"""Least time between two reports of statistics: each wakes five threads of two processes, which a step on a few cores feels."""

log = logging.getLogger(__name__)


class EngineHost:
    """Serves `engine`, once it has started, on a bound ROUTER socket. The identity of a connection is the client's name here."""

    def __init__(self, engine: Engine, socket: "zmq.Socket[bytes]") -> None:
        self.engine = engine
        self._clients: dict[bytes, _Client] = {}
        self._socket = wire.LoopSocket(socket, self._receive)

    async def serve(self) -> None:
        """Serve until the engine falls ill; raises EngineFailure then."""
        while True:
            await asyncio.sleep(wire.BEAT_SECONDS)
            healthy = self.engine.healthy
            for client in list(self._clients.values()):
                client.beat(healthy)
            if not healthy:
                raise EngineFailure("the engine has stopped working")

    def close(self) -> None:
        """Abort everything."""
        for client in list(self._clients.values()):
            self.forget(client)
        self._socket.close(linger_ms=100)

    def send(self, client: "_Client", reports: list[wire.Report]) -> bool:
        """Send what fits the wire; False if the client takes nothing at present. Forgets a client that has gone."""
        payload = wire.encode(wire.Reports(client.generation, reports))
        if len(payload) > wire.MAX_MESSAGE_BYTES:
            return all(self.send(client, [report]) for report in _divided(reports))
        try:
            self._socket.send([client.identity, payload])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.forget(client)
        return True

    def forget(self, client: "_Client") -> None:
        if self._clients.pop(client.identity, None) is not None:
            client.abort_all()

    def _receive(self, frames: list[bytes]) -> None:
        identity, *frames = frames
        try:
            batch = wire.unpack(frames)
        except ValueError as error:
            log.warning("a message that is none was ignored: %s", error)
            return
        for command in batch.commands:
            if isinstance(command, wire.Hello):
                if identity in self._clients:
                    self.forget(self._clients[identity])
                client = self._clients[identity] = _Client(self, identity, batch.generation)
                client.report(wire.Welcome(self.engine.info, wire.can_open(command.sample)))
            elif identity in self._clients and self._clients[identity].generation == batch.generation:
                self._clients[identity].obey(command)


def _divided(reports: list[wire.Report]) -> list[wire.Report]:
    """`reports` with each that does not fit a message replaced by a failure of its request."""
    fitting: list[wire.Report] = []
    for report in reports:
        if len(wire.encode(report)) + 64 <= wire.MAX_MESSAGE_BYTES:
            fitting.append(report)
        elif isinstance(report, wire.Output):
            fitting.append(wire.failed(report.key, EngineFailure("the output is too large to pass between processes")))
        else:
            log.error("a %s message is too large to send", type(report).__name__)
    return fitting


class _Client:
    """One connection: its running requests and its subscriptions, and what they have to report."""

    def __init__(self, host: EngineHost, identity: bytes, generation: int) -> None:
        self.identity = identity
        self.generation = generation
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._requests: dict[int, DeltaStream] = {}
        self._subscriptions: dict[wire.Topic, asyncio.Task[None]] = {}
        self._outbox: list[wire.Report] = []
        self._dropped = False

    def obey(self, command: wire.Command) -> None:
        match command:
            case wire.Generate():
                self._generate(command)
            case wire.Unopened():
                error = EngineUnavailable(f"the embeddings of an image cannot be opened: {command.reason}")
                self.report(wire.failed(command.key, error))
            case wire.Abort():
                if command.key in self._requests:
                    self._requests[command.key].close()
            case wire.Subscribe():
                self._subscribe(command)
            case wire.Goodbye():
                self._host.forget(self)

    def report(self, report: wire.Report) -> None:
        """Send with all else that is reported in this turn of the loop."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(report)

    def beat(self, healthy: bool) -> None:
        if not self._dropped:
            self.report(wire.Beat(healthy))
        elif self._host.send(self, [wire.Dropped()]):
            self._host.forget(self)

    def abort_all(self) -> None:
        for stream in list(self._requests.values()):
            stream.close()
        for task in self._subscriptions.values():
            task.cancel()

    def _flush(self) -> None:
        reports, self._outbox = self._outbox, []
        if not self._dropped and not self._host.send(self, reports):
            log.warning("a client has not read for too long: its %d requests are aborted", len(self._requests))
            self._dropped = True
            self.abort_all()

    def _generate(self, command: wire.Generate) -> None:
        try:
            stream = self._host.engine.generate(command.request)
        except Exception as error:
            stream = DeltaStream.failed(error)
        assert isinstance(stream, DeltaStream), "an engine's own, not one that wraps it"
        self._requests[command.key] = stream
        stream.when_done(lambda: self._requests.pop(command.key, None))
        stream.pipe(partial(self._pass_on, command.key))

    def _pass_on(self, key: int, output: Delta | Exception) -> None:
        if isinstance(output, Delta):
            self.report(wire.Output(key, output))
        elif isinstance(output, EngineError):
            self.report(wire.failed(key, output))
        else:  # a bug in the engine: the client learns of its kind only
            log.error("a request failed", exc_info=output)
            self.report(wire.failed(key, EngineFailure("internal error of the engine")))

    def _subscribe(self, command: wire.Subscribe) -> None:
        if command.topic in self._subscriptions:
            self._subscriptions[command.topic].cancel()
        report = self._report_stats() if command.topic == "stats" else self._report_kv_events()
        self._subscriptions[command.topic] = asyncio.create_task(report)

    async def _report_stats(self) -> None:
        async for stats in self._host.engine.stats():
            self.report(wire.Stats(stats))
            await asyncio.sleep(_STATS_SECONDS)

    async def _report_kv_events(self) -> None:
        async with aclosing(self._host.engine.kv_events()) as batches:
            async for events in batches:
                self.report(wire.KvEvents(events))
                await asyncio.sleep(0)  # one message for each: all that an engine holds is a lot


def bind(address: str) -> "zmq.Socket[bytes]":
    """A ROUTER socket at `address`; only this user may connect to an ipc one."""
    socket: zmq.Socket[bytes] = wire.context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    mask = os.umask(0o077)
    try:
        socket.bind(address)
    finally:
        os.umask(mask)
    return socket


async def run(options: wire.HostOptions, stop: asyncio.Event, control: TextIO) -> None:
    """Start the engine and serve it until `stop`. Raises EngineFailure if it cannot start or falls ill."""
    socket = bind(options.address)
    try:
        engine = create_engine(options.config)
        try:
            if await _completed(asyncio.create_task(engine.start()), stop):
                await _serve(EngineHost(engine, socket), stop, control)
        finally:
            # However a broken engine's library takes its end: the parent waits for that of the process, to start another.
            threading.Thread(target=_exit_by_force, args=(options,), daemon=True).start()
            await engine.close()
    finally:
        socket.close(linger=0)
        wire.remove_socket_file(options.address)


async def _serve(host: EngineHost, stop: asyncio.Event, control: TextIO) -> None:
    gc.freeze()  # what is loaded now stays: to walk it would take 0.2 s
    print("ready", file=control, flush=True)
    try:
        await _completed(asyncio.create_task(host.serve()), stop)
    finally:
        host.close()


async def _completed(task: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Wait for `task` and raise what it raised; False if `stop` came first and the task was cancelled."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        stopping.cancel()
        task.result()
        return True
    task.cancel()
    await asyncio.wait([task])
    return False


def _stop_at_end_of_input(
    channel: stdio.Channel, loop: asyncio.AbstractEventLoop, stop: asyncio.Event, options: wire.HostOptions
) -> None:
    """Wait for the parent to go, and exit; by force if the loop does not obey. Runs in a thread, so that a stuck step cannot hinder it."""
    while os.read(channel.input, 4096):
        pass
    loop.call_soon_threadsafe(stop.set)
    _exit_by_force(options)


def _exit_by_force(options: wire.HostOptions) -> None:
    """In a thread: end the process, unless it ends by itself in time."""
    time.sleep(STOP_SECONDS + options.config.extra_stop_seconds)
    wire.remove_socket_file(options.address)
    os._exit(1)


async def _main(options: wire.HostOptions, channel: stdio.Channel) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=_stop_at_end_of_input, args=(channel, loop, stop, options), daemon=True).start()
    await run(options, stop, channel.output)


def main() -> int:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # the grammar worker inherits that
    sys.setswitchinterval(_SWITCH_SECONDS)
    channel = stdio.take()
    line = b""
    while not line.endswith(b"\n"):
        if not (chunk := os.read(channel.input, 65536)):
            return 1
        line += chunk
    options = msgspec.json.decode(line, type=wire.HostOptions)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_main(options, channel))
    except EngineFailure as error:
        log.error("%s", error, exc_info=error.__cause__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
