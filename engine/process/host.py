"""The host of a service: a process that serves it to any number of clients over a local ZMQ socket.

It is started by `python -m engine.process.host MODULE:INTERFACE [HINT]` (`command.py`). With a hint it begins with
imports (`Interface.anticipate`).

Standard input starts with one line of JSON, a `wire.HostOptions`, and stays open for the life of the host. On standard
output the line `ready` means that clients are served, `failed REASON` that the host ends, and the optional `successor
CONFIG` has the configuration of the standby host. For a service with `hang_seconds`, lines `beat` follow `ready` as
long as the event loop runs. A standby host prepares, says `standby`, and goes on when a line `go` comes. SIGTERM,
SIGINT and SIGHUP have no effect: a service manager sends them to the parent too, which still drains. Processes that it
has started are killed when it ends.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import pkgutil
import signal
import sys
import threading
import time
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn, TextIO

import msgspec
import zmq

from engine.errors import EngineError, EngineFailure, EngineUnavailable
from engine.kit import logs
from engine.kit.priority import give_way
from engine.process import tree, wire
from engine.process.service import HostedService, Interface, Method, Results
from engine.process.sockets import LoopSocket, context, remove_socket_file
from engine.transfer.base import TransferError

STOP_SECONDS = 2.0
"""Time a host may take to stop, in addition to its service's own."""
SWITCH_SECONDS = 0.0005
"""Seconds after which a thread must hand the interpreter to another: a tenth of Python's default."""
STUCK_SECONDS = 10.0
"""Seconds for which a client's queue may be full before its calls are cancelled. A client that the operating system
does not run for a moment, on a busy machine, is not stuck."""
_HIGH_WATER_MARK = 256
"""Batches in the queue of a client. More replies wait in the client's outbox, where they become larger batches. ZMQ
takes further ones after about half of a full queue has been read."""
_RETRY_SECONDS = 0.02
"""Pause before the next attempt to send to a client whose queue is full. Reading a full queue takes it longer."""
_MOST_REPLIES = 1024
"""Replies in one batch: a client handles a whole batch before its event loop does anything else."""
_MOST_WAITING = 1 << 18
"""Replies in the outbox of a client whose queue is full before it counts as stuck at once. Each takes about 200 bytes,
or 4 kB with 20 log-probabilities."""
_MOST_INHERITED = 256
_MOST_REASON = 4000
"""Bytes of a reason, so that a pipe takes its line whole, and the parent reads it."""

log = logging.getLogger(__name__)


class ServiceHost:
    """Serves a started service on a bound ROUTER socket. A connection's identity is the client's name here."""

    def __init__(self, interface: Interface[Any, Any], service: HostedService, socket: "zmq.Socket[bytes]") -> None:
        self.interface = interface
        self.service = service
        self._clients: dict[bytes, _Client] = {}
        self._socket = LoopSocket(socket, self._receive)

    async def serve(self) -> None:
        """Serve until the service is unhealthy; raises EngineFailure then."""
        while True:
            await asyncio.sleep(wire.BEAT_SECONDS)
            healthy = self.service.healthy
            for client in list(self._clients.values()):
                client.beat(healthy)
            if not healthy:
                raise EngineFailure(f"the {self.interface.noun} has stopped working")

    def close(self) -> None:
        """Cancel all calls."""
        for client in list(self._clients.values()):
            self.forget(client)
        self._socket.close(linger_ms=100)

    def send(self, client: "_Client", replies: list[wire.Reply]) -> int:
        """Send replies in order, divided if needed; return how many, which are fewer if the client's queue is full.

        Forgets a client that has gone.
        """
        payload = wire.encode(wire.Replies(client.generation, replies))
        if len(payload) > wire.MAX_MESSAGE_BYTES:
            if len(replies) > 1:
                return sum(takewhile(bool, (self.send(client, [reply]) for reply in replies)))
            payload = wire.encode(wire.Replies(client.generation, _instead_of(replies[0])))
        try:
            self._socket.send([client.identity, payload])
        except zmq.Again:
            return 0
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.forget(client)
        return len(replies)

    def forget(self, client: "_Client") -> None:
        if self._clients.pop(client.identity, None) is not None:
            client.cancel_all()

    def _receive(self, frames: list[bytes]) -> None:
        identity, *frames = frames
        try:
            generation, commands = wire.unpack(frames)
        except ValueError as error:
            log.warning("ignored a malformed message: %s", error)
            return
        for command, parts in commands:
            if isinstance(command, wire.Hello):
                self._welcome(identity, generation, command)
            elif identity in self._clients and self._clients[identity].generation == generation:
                self._clients[identity].obey(command, parts)

    def _welcome(self, identity: bytes, generation: int, hello: wire.Hello) -> None:
        if identity in self._clients:
            self.forget(self._clients[identity])
        client = self._clients[identity] = _Client(self, identity, generation)
        client.reply(wire.Accepted(msgspec.Raw(wire.encode(self.service.info)), wire.can_open(hello.sample)))


def _instead_of(reply: wire.Reply) -> list[wire.Reply]:
    """Return what to send instead of a reply that does not fit a message: the failure of the call."""
    if isinstance(reply, wire.Output):
        return [wire.failed(reply.key, EngineFailure("the output is too large to pass between processes"))]
    log.error("a %s message is too large to send", type(reply).__name__)
    return []


class _Client:
    """One connection: its running calls and subscriptions, and the replies that wait to be sent."""

    def __init__(self, host: ServiceHost, identity: bytes, generation: int) -> None:
        self.identity = identity
        self.generation = generation
        self._loop = asyncio.get_running_loop()
        self._host = host
        self._calls: dict[int, Results] = {}
        self._subscriptions: dict[str, asyncio.Task[None]] = {}
        self._outbox: list[wire.Reply] = []
        self._full_seconds = 0.0
        """Time for which the client's queue has been full, in pauses between attempts: the clock may jump while a
        container is suspended."""
        self._dropped = False

    def obey(self, command: wire.Command, frames: list[bytes]) -> None:
        if self._dropped and not isinstance(command, wire.Goodbye):
            return  # it has not read yet that it was dropped
        match command:
            case wire.Call():
                self._call(command, frames)
            case wire.Cancel():
                if command.key in self._calls:
                    self._calls[command.key].close()
            case wire.Subscribe():
                self._subscribe(command.topic)
            case wire.Goodbye():
                self._host.forget(self)

    def reply(self, reply: wire.Reply) -> None:
        """Send together with all other replies of this pass of the loop, or later if the client's queue is full."""
        if self._dropped:
            return
        if not self._outbox:  # otherwise `_flush` is about to be called
            self._loop.call_soon(self._flush)
        self._outbox.append(reply)

    def beat(self, healthy: bool) -> None:
        if not self._dropped:
            self.reply(wire.Beat(healthy))
        elif self._host.send(self, [wire.Dropped()]):
            self._host.forget(self)

    def cancel_all(self) -> None:
        self._outbox.clear()
        for results in list(self._calls.values()):
            results.close()
        for task in self._subscriptions.values():
            task.cancel()

    def _flush(self) -> None:
        """Send the outbox. Try again later while the client's queue is full; drop a client that is stuck."""
        while self._outbox and not self._dropped:
            sent = self._host.send(self, self._outbox[:_MOST_REPLIES])
            del self._outbox[:sent]
            if sent:
                self._full_seconds = 0.0
            elif self._full_seconds < STUCK_SECONDS and len(self._outbox) <= _MOST_WAITING:
                self._full_seconds += _RETRY_SECONDS
                self._loop.call_later(_RETRY_SECONDS, self._flush)
                return
            else:
                log.warning("a client has not read for too long: cancelled its %d calls", len(self._calls))
                self._dropped = True
                self.cancel_all()

    def _call(self, call: wire.Call, frames: list[bytes]) -> None:
        try:
            results = self._begin(call, frames)
        except Exception as error:
            self._fail(call.key, error)
            return
        self._calls[call.key] = results
        results.when_done(lambda: self._calls.pop(call.key, None))
        results.pipe(partial(self._pass_on, call.key))

    def _begin(self, call: wire.Call, frames: list[bytes]) -> Results:
        """Begin a call. Raises EngineError; any other exception is a bug."""
        method: Method[Any, Any] = self._host.interface.methods[call.method]
        try:
            argument = method.attach(method.decode_argument(call.argument), wire.parts_of(call, frames))
        except (TransferError, OSError) as error:
            raise EngineUnavailable(f"shared memory of the request cannot be opened: {error}") from error
        started = method.run(self._host.service, argument)
        return _Task(started) if asyncio.iscoroutine(started) else started

    def _pass_on(self, key: int, result: Any) -> None:
        if isinstance(result, Exception):
            self._fail(key, result)
        else:
            self.reply(wire.Output(key, msgspec.Raw(wire.encode(result))))

    def _fail(self, key: int, error: Exception) -> None:
        """Report the error of a call. The client learns no details of a bug in the service."""
        if not isinstance(error, EngineError):
            log.error("a call failed", exc_info=error)
            error = EngineFailure(f"internal error of the {self._host.interface.noun}")
        self.reply(wire.failed(key, error))

    def _subscribe(self, topic: str) -> None:
        if topic in self._subscriptions:
            self._subscriptions[topic].cancel()
        self._subscriptions[topic] = asyncio.create_task(self._report(topic))

    async def _report(self, topic: str) -> None:
        found = self._host.interface.topics[topic]
        async with contextlib.aclosing(found.run(self._host.service)) as reports:
            async for report in reports:
                self.reply(wire.News(topic, msgspec.Raw(wire.encode(report))))
                await asyncio.sleep(found.pause_seconds)  # one message each: together they may be too large


class _Task:
    """The one result of a coroutine, as a stream."""

    def __init__(self, work: Any) -> None:
        self._task: asyncio.Task[Any] = asyncio.ensure_future(work)

    def pipe(self, sink: Any) -> None:
        def pass_on(task: "asyncio.Task[Any]") -> None:
            if not task.cancelled():
                sink(task.exception() or task.result())

        self._task.add_done_callback(pass_on)

    def when_done(self, callback: Any) -> None:
        self._task.add_done_callback(lambda _: callback())

    def close(self) -> None:
        self._task.cancel()


def bind(address: str) -> "zmq.Socket[bytes]":
    """Bind a ROUTER socket at `address`; only this user may connect to an ipc:// address."""
    socket: zmq.Socket[bytes] = context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    mask = os.umask(0o077)
    try:
        socket.bind(address)
    finally:
        os.umask(mask)
    return socket


class _Channel(NamedTuple):
    """The pipes between this process and its parent.

    They are kept from our children: one that inherited them and outlived us would keep them open, and the parent would
    not see the end.
    """

    input: int
    """File descriptor of the former standard input."""
    output: TextIO
    """The former standard output."""


def _take_pipes() -> _Channel:
    """Take over both pipes. Standard input is then empty, and standard output goes to standard error.

    Call this before any file is opened: descriptors above 2 are closed, because uvloop leaves its children copies of
    the pipes.
    """
    os.closerange(3, _MOST_INHERITED)
    channel = _Channel(os.dup(0), os.fdopen(os.dup(1), "w"))  # not inherited by children
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return channel


class _HostProcess:
    """The life of a host process."""

    def __init__(
        self, interface: Interface[Any, Any], options: wire.HostOptions, channel: _Channel, told: bytes
    ) -> None:
        """`told`: input that arrived behind the options."""
        self._interface = interface
        self._address = options.address
        self._standby = options.standby
        self._config = msgspec.json.decode(options.config, type=interface.config)
        self._channel = channel
        self._stop = asyncio.Event()
        self._go = asyncio.Event()
        if told:
            self._go.set()
        self._beats: asyncio.Task[None] | None = None
        self._bound = False
        """Whether the socket at the address is this host's; a standby leaves it to the one that serves."""

    async def run(self) -> None:
        """Start the service and serve it until the parent ends.

        Raises EngineFailure if it cannot start or stops working.
        """
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._stop_at_end_of_input, args=(loop,), daemon=True).start()
        if self._standby == "imports":
            preload = give_way(partial(self._interface.preload, self._config))
            if not await self._completed(preload):
                return
        service = self._interface.create(self._config)
        gc.freeze()  # walking them would take 0.2 s
        gc.enable()
        try:
            if not self._standby or await self._completed(self._wait_to_serve(service)):
                await self._start(service)
        finally:
            # A broken library may block while it closes, and the parent waits for the end of the process to start
            # another.
            threading.Thread(target=self.exit_by_force, daemon=True).start()
            await service.close()

    async def _wait_to_serve(self, service: HostedService) -> None:
        if self._standby == "model":
            await self._interface.prepare(service)
        print("standby", file=self._channel.output, flush=True)
        await self._go.wait()

    async def _start(self, service: HostedService) -> None:
        socket = bind(self._address)
        self._bound = True
        try:
            if await self._completed(service.start()):
                if (successor := self._interface.successor(self._config, service)) != self._config:
                    print("successor", msgspec.json.encode(successor).decode(), file=self._channel.output)
                await self._serve(ServiceHost(self._interface, service, socket))
        finally:
            socket.close(linger=0)
            remove_socket_file(self._address)
            self._bound = False

    async def _serve(self, host: ServiceHost) -> None:
        gc.freeze()  # loaded objects stay, too
        print("ready", file=self._channel.output, flush=True)
        self._beats = asyncio.create_task(self._beat())  # until the process ends: closing takes time
        try:
            await self._completed(host.serve())
        finally:
            host.close()

    async def _beat(self) -> None:
        """Send heartbeats to the parent as long as the event loop runs."""
        output = self._channel.output.fileno()
        os.set_blocking(output, False)
        while self._interface.hang_seconds(self._config):
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the parent is suspended, or has gone
                os.write(output, b"beat\n")
            await asyncio.sleep(wire.PARENT_BEAT_SECONDS)

    async def _completed(self, work: Any) -> bool:
        """Wait for `work` and raise its exception.

        Returns False if the host was told to stop first; `work` is then cancelled.
        """
        task, stopping = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            stopping.cancel()
            task.result()
            return True
        task.cancel()
        await asyncio.wait([task])
        return False

    def _stop_at_end_of_input(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the parent to end, then stop the host, by force if the event loop does not react.

        Runs in a thread, so that a stuck event loop cannot hinder it.
        """
        while os.read(self._channel.input, 4096):
            loop.call_soon_threadsafe(self._go.set)
        loop.call_soon_threadsafe(self._stop.set)
        self.exit_by_force()

    def exit_by_force(self) -> None:
        """End the process from a thread unless it ends by itself in time."""
        time.sleep(STOP_SECONDS + self._interface.more_stop_seconds(self._config))
        if self._bound:
            remove_socket_file(self._address)
        leave(1)


def leave(code: int) -> NoReturn:
    """End this process and those that it has started, without handlers that run at exit: a broken library may block
    there.
    """
    tree.kill(tree.own_mark())
    os._exit(code)


def main(interface: Interface[Any, Any], hint: str | None = None) -> int:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)  # not SIG_IGN, which child processes would inherit
        signal.siginterrupt(signum, False)
    sys.setswitchinterval(SWITCH_SECONDS)
    channel = _take_pipes()
    gc.disable()  # imports make a million objects that stay
    if hint is not None:
        with contextlib.suppress(Exception):  # whoever needs what cannot be imported says so
            interface.anticipate(hint)
    line = b""
    while b"\n" not in line:
        if not (chunk := os.read(channel.input, 65536)):
            return 1
        line += chunk
    line, _, told = line.partition(b"\n")
    options = msgspec.json.decode(line, type=wire.HostOptions)
    logs.configure(options.logs)
    try:
        # Not by uvloop, which starts children by fork: that copies an engine's page tables, and its thread waits.
        asyncio.run(_HostProcess(interface, options, channel, told).run())
    except EngineFailure as error:
        _report(channel, error, str(error))
        return 1
    except Exception as error:
        _report(channel, error, f"{type(error).__name__}: {error} (LOG_LEVEL=debug shows where)")
        return 1
    return 0


def _report(channel: _Channel, error: Exception, reason: str) -> None:
    """Tell the parent why this process ends; it logs the reason."""
    log.debug("the process ends", exc_info=error)
    line = f"failed {' '.join(reason.split())}".encode(errors="replace")[:_MOST_REASON]
    with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the parent is suspended, or has gone
        os.write(channel.output.fileno(), line + b"\n")


if __name__ == "__main__":
    status = main(pkgutil.resolve_name(sys.argv[1]), *sys.argv[2:])
    sys.stdout.flush()
    leave(status)
