"""Subscriber of a rank's KV-cache events, which asks again for missed ones: at the start, after a gap or a silence.

Frames are `[topic, number, payload]`; a replay is asked for with `[empty, first number]` and ends with number -1.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engine.replicas.routing.events import END_OF_REPLAY, SEQUENCE, CacheEvent, ClearedEvent, decode

REPLAY_SECONDS = 1.0
"""Seconds that may pass between two messages of a replay."""
NO_REPLAY_SECONDS = 60.0
"""Pause in seconds after an unanswered request for a replay, which the replica may not offer. It ends when the replica
comes back."""
QUIET_SECONDS = 3.0
"""Silence after which missed messages are asked for: the last one may have been lost."""
_HIGH_WATER = 100_000
"""Messages that may wait here; a burst beyond them becomes a gap."""
_BATCH = 64
"""Messages that are read before the connection is looked at again."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EventCounts:
    """Counts of a replica's events that did not arrive as they should."""

    gaps: int = 0
    missed: int = 0
    """Messages that did not come in order."""
    replayed: int = 0
    """Messages that came when asked for again."""
    malformed: int = 0
    unattached: int = 0
    """Blocks that were left out because their parent is not known."""


class Subscriber:
    """Calls `apply` with the events of `rank`, published at `endpoint`, however often the publisher restarts.

    Missed messages are asked for at `replay`, if that is not empty. When the publisher may be another one, a
    ClearedEvent comes first.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str,
        topic: str,
        rank: int,
        apply: Callable[[CacheEvent], None],
        counts: EventCounts,
    ) -> None:
        self.expected = 0
        """Number of the next message."""
        self._endpoint = endpoint
        self._replay = replay
        self._topic = topic.encode()
        self._rank = rank
        self._apply = apply
        self._counts = counts
        self._replayed = -1
        """Number of the last message of a replay: those up to it may come once more."""
        self._no_replay_until = 0.0

    async def run(self) -> None:
        """Follow the publisher until cancelled."""
        with _socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            try:
                socket.connect(self._endpoint)
                await self._follow(socket, monitor)
            finally:
                socket.disable_monitor()
                monitor.close()

    async def _follow(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
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
                await self._recover()
            if socket in ready:
                await self._read(socket)
            elif connected and not ready:
                await self._recover()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        for _ in range(_BATCH):
            try:
                frames = await socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) != SEQUENCE.size:
                self._counts.malformed += 1
                continue
            (number,) = SEQUENCE.unpack(frames[1])
            if number < self.expected:
                if number <= self._replayed:
                    continue
                self._restart()
            if number > self.expected:
                self._counts.gaps += 1
                self._counts.missed += number - self.expected
                log.info("KV events of %s: expected message %d, got %d", self._endpoint, self.expected, number)
                await self._recover()
            self._take(number, frames[2])
            await asyncio.sleep(0)  # reading what has arrived does not yield by itself

    def _restart(self) -> None:
        self.expected = 0
        self._replayed = -1
        self._no_replay_until = 0.0
        self._apply(ClearedEvent(self._rank))

    def _take(self, number: int, payload: bytes) -> None:
        """Apply the events of a message, unless they have been."""
        if number < self.expected:
            return
        self.expected = number + 1
        try:
            events = decode(payload)
        except ValueError as error:
            log.warning("KV events of %s: ignored a malformed message: %s", self._endpoint, error)
            self._counts.malformed += 1
            return
        for event in events:
            self._apply(event)

    async def _recover(self) -> None:
        """Ask for all messages from the expected one on. Those that the publisher no longer keeps stay missed."""
        if not self._replay or time.monotonic() < self._no_replay_until:
            return
        with _socket(zmq.DEALER) as socket:
            socket.connect(self._replay)
            await socket.send_multipart([b"", SEQUENCE.pack(self.expected)])
            try:
                while True:
                    async with asyncio.timeout(REPLAY_SECONDS):
                        number, payload = await _reply(socket)
                    if number == END_OF_REPLAY:
                        break
                    self._counts.replayed += number >= self.expected
                    self._take(number, payload)
                    self._replayed = max(self._replayed, number)
                    await asyncio.sleep(0)
            except TimeoutError:
                self._no_replay_until = time.monotonic() + NO_REPLAY_SECONDS
                log.info(
                    "no replay of KV events at %s: missed events stay missed; not asked again for %g s",
                    self._replay,
                    NO_REPLAY_SECONDS,
                )


def _socket(kind: int) -> zmq.asyncio.Socket:
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    return socket


async def _reply(socket: zmq.asyncio.Socket) -> tuple[int, bytes]:
    """Number and payload of a replayed message: vLLM sends three frames, others put a topic before the last two."""
    frames: list[bytes] = await socket.recv_multipart()
    if len(frames) not in (3, 4) or len(frames[-2]) != SEQUENCE.size:
        return END_OF_REPLAY, b""
    return SEQUENCE.unpack(frames[-2])[0], frames[-1]
