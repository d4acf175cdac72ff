"""Listens to one replica's KV events, and asks again for those that were missed: at the start, after a gap, and when nothing has come for a
while. Frames are `[topic, number, payload]`; a replay is asked for with `[empty, first number]` and ends with number -1.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engine.replicas.routing.events import END_OF_REPLAY, SEQUENCE, CacheEvent, decode

REPLAY_SECONDS = 1.0
"""How long a replay may be silent."""
NO_REPLAY_SECONDS = 60.0
"""After a silent one, none is asked for until so much later, or until the replica is back: it may not have any."""
QUIET_SECONDS = 3.0
"""After so much silence, what has been missed is asked for: the last message may have been."""
_HIGH_WATER = 100_000
"""Messages that may wait here; a burst beyond them becomes a gap."""
_BATCH = 64
"""Messages that are read before the connection is looked at again."""

log = logging.getLogger(__name__)


class EventHandler(Protocol):
    """Who learns from the events."""

    def apply(self, event: CacheEvent) -> None: ...

    def restarted(self) -> None:
        """What was said before holds no more: the replica is another one, or may be."""

    def gap(self, missed: int) -> None:
        """So many messages did not come in their turn."""

    def replayed(self, messages: int) -> None:
        """So many came when asked for again."""

    def malformed(self) -> None:
        """A message made no sense."""


class Subscriber:
    """Follows the publisher at `endpoint`, however often it goes and comes back. `replay` is where to ask again; empty: nowhere."""

    def __init__(self, endpoint: str, replay: str, topic: str, handler: EventHandler) -> None:
        self._endpoint, self._replay, self._topic = endpoint, replay, topic.encode()
        self._handler = handler
        self._expected = 0
        """Number of the next message."""
        self._replayed = -1
        """Number of the last one that a replay brought: those up to it may come once more."""
        self._no_replay_until = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        context = zmq.asyncio.Context.instance()
        with self._socket(context, zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            try:
                socket.connect(self._endpoint)
                await self._follow(context, socket, monitor)
            finally:
                socket.disable_monitor()
                monitor.close()

    async def _follow(
        self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket
    ) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        connected = False
        while True:
            ready = dict(await poller.poll(QUIET_SECONDS * 1e3))
            if monitor in ready:
                parse_monitor_message(await monitor.recv_multipart())
                connected = True
                self._restart()
                await self._recover(context)
            if socket in ready:
                await self._read(context, socket)
            elif connected and not ready:
                await self._recover(context)

    async def _read(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
        for _ in range(_BATCH):
            try:
                frames = await socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) != SEQUENCE.size:
                self._handler.malformed()
                continue
            (number,) = SEQUENCE.unpack(frames[1])
            if number < self._expected:
                if number <= self._replayed:
                    continue
                self._restart()
            if number > self._expected:
                self._handler.gap(number - self._expected)
                log.info("KV events of %s: expected message %d, got %d", self._endpoint, self._expected, number)
                await self._recover(context)
            self._take(number, frames[2])
            await asyncio.sleep(0)  # what is there already is read without a turn for others

    def _restart(self) -> None:
        self._expected, self._replayed, self._no_replay_until = 0, -1, 0.0
        self._handler.restarted()

    def _take(self, number: int, payload: bytes) -> None:
        """Have the sink learn from a message, unless it has."""
        if number < self._expected:
            return
        self._expected = number + 1
        try:
            events = decode(payload)
        except ValueError as error:
            log.warning("a message of KV events of %s makes no sense: %s", self._endpoint, error)
            self._handler.malformed()
            return
        for event in events:
            self._handler.apply(event)

    async def _recover(self, context: zmq.asyncio.Context) -> None:
        """Ask for everything from the expected message on. What nobody keeps any more stays missed."""
        if not self._replay or time.monotonic() < self._no_replay_until:
            return
        count = 0
        with self._socket(context, zmq.DEALER) as socket:
            socket.connect(self._replay)
            await socket.send_multipart([b"", SEQUENCE.pack(self._expected)])
            try:
                while True:
                    async with asyncio.timeout(REPLAY_SECONDS):
                        number, payload = await _reply(socket)
                    if number == END_OF_REPLAY:
                        break
                    count += number >= self._expected
                    self._take(number, payload)
                    self._replayed = max(self._replayed, number)
                    await asyncio.sleep(0)
            except TimeoutError:
                self._no_replay_until = time.monotonic() + NO_REPLAY_SECONDS
                log.info("no replay of KV events at %s", self._replay)
        if count:
            self._handler.replayed(count)

    @contextmanager
    def _socket(self, context: zmq.asyncio.Context, kind: int) -> Iterator[zmq.asyncio.Socket]:
        socket: zmq.asyncio.Socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        try:
            yield socket
        finally:
            socket.close()


async def _reply(socket: zmq.asyncio.Socket) -> tuple[int, bytes]:
    """Number and payload of a replay's message: vLLM sends three frames, others put a topic before the last two."""
    frames: list[bytes] = await socket.recv_multipart()
    if len(frames) not in (3, 4) or len(frames[-2]) != SEQUENCE.size:
        return END_OF_REPLAY, b""
    return SEQUENCE.unpack(frames[-2])[0], frames[-1]
