"""Messages over ZMQ, a channel for each data-parallel rank: published, and sent again to consumers that missed some.

A message is three frames: topic, sequence number (8 bytes, big-endian, from 0), payload. A DEALER that asks the replay
socket for the messages from a number on (`[empty, number]`) gets `[empty, number, payload]` for each that is still
kept, and then END with no payload.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import islice

import zmq

from engine.errors import EngineFailure
from engine.process.sockets import LoopSocket, context
from engine.replicas.publisher.sink import Message

END = b"\xff" * 8
"""Marks the end of the messages, in place of a sequence number."""
_HIGH_WATER_MARK = 1000
"""Messages that may wait for a slow subscriber. It misses those beyond, and can have them sent again."""
_KEPT_BYTES = 64 << 20
"""Maximum bytes of the messages that are kept to be sent again."""
_LARGEST_REQUEST = 1024
"""Maximum bytes of a message from a consumer: a topic that it subscribes to, or a sequence number."""
_BURST = 64
"""Messages sent again before other tasks may run."""

log = logging.getLogger(__name__)


def of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: a port higher by `rank`, or a path with a suffix.

    Port 0 (any free port) and an empty endpoint (not published) are returned as they are.
    """
    if rank == 0 or not endpoint or endpoint.endswith(":0"):
        return endpoint
    if endpoint.startswith("tcp://"):
        address, _, port = endpoint.rpartition(":")
        return f"{address}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


class ZmqSink:
    """A `Sink` with sockets bound at `endpoint` for each of `ranks` ranks, and at `replay`, empty for no replays.

    `on_late` is called when a consumer asks for messages that are no longer kept, and that it needs to know all blocks.
    The next message of each rank must be whole then.
    """

    name = "zmq"
    dropped = 0
    waiting = 0

    def __init__(
        self, endpoint: str, replay: str, topic: str, capacity: int, ranks: int, on_late: Callable[[], object]
    ) -> None:
        """Raises EngineFailure if an address cannot be bound."""
        self.channels: list[ZmqChannel] = []
        self._on_late = on_late
        try:
            for rank in range(ranks):
                own = (of_rank(endpoint, rank), of_rank(replay, rank))
                channel = ZmqChannel(*own, topic, capacity, self._start_over)
                self.channels.append(channel)
                again = f", again on {channel.replay_endpoint}" if replay else ""
                log.info("KV-cache events are published on %s%s", channel.endpoint, again)
        except EngineFailure:
            self.close()
            raise

    def send(self, message: Message) -> None:
        self.channels[message.rank].send(message.payload, message.is_whole)

    async def run(self) -> None:
        """Return: ZMQ sends in threads of its own."""

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def _start_over(self) -> None:
        for channel in self.channels:  # at once: one that asks again before the next message changes nothing
            channel.whole_from = channel.sequence
        self._on_late()


class ZmqChannel:
    """Bound sockets of one rank. `replay` is empty for none; at most `capacity` messages are kept for it."""

    def __init__(
        self, endpoint: str, replay: str, topic: str, capacity: int, on_late: Callable[[], object] = lambda: None
    ) -> None:
        self.sequence = 0
        """Number of the next message."""
        self.whole_from = 0
        """Number of the last whole message."""
        self.replayed = 0
        """Messages sent again."""
        self._on_late = on_late
        self._topic = topic.encode()
        self._capacity = capacity if replay else 0
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._publisher: zmq.Socket[bytes] = context().socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._publisher.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)
        self._requests: LoopSocket | None = None
        self._replays: dict[bytes, asyncio.Task[None]] = {}
        try:
            self.endpoint = _bind(self._publisher, endpoint)
            self.replay_endpoint = ""
            if replay:
                router: zmq.Socket[bytes] = context().socket(zmq.ROUTER)
                router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                router.setsockopt(zmq.SNDHWM, capacity + 1)
                router.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)
                self._requests = LoopSocket(router, self._replay)
                self.replay_endpoint = _bind(router, replay)
        except EngineFailure:
            self.close()
            raise

    def send(self, payload: bytes, is_whole: bool = False) -> None:
        """Publish a message; never waits."""
        if is_whole:
            self.whole_from = self.sequence
        number = self.sequence.to_bytes(8, "big")
        self._publisher.send_multipart([self._topic, number, payload], zmq.NOBLOCK)
        self.sequence += 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._capacity or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def close(self) -> None:
        for task in self._replays.values():
            task.cancel()
        if self._requests is not None:
            self._requests.close()
        self._publisher.close(linger=0)

    def _replay(self, frames: list[bytes]) -> None:
        """Begin to answer a consumer instead of its request before."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        identity, start, oldest = frames[0], int.from_bytes(frames[2], "big"), self.sequence - len(self._kept)
        if oldest > max(start, self.whole_from):
            self._on_late()
        if identity in self._replays:
            self._replays[identity].cancel()
        task = self._replays[identity] = asyncio.create_task(self._send_again(identity, start))
        task.add_done_callback(lambda done: self._forget(identity, done))

    def _forget(self, identity: bytes, task: "asyncio.Task[None]") -> None:
        if self._replays.get(identity) is task:
            del self._replays[identity]
        if not task.cancelled():
            task.result()

    async def _send_again(self, identity: bytes, start: int) -> None:
        assert self._requests is not None
        skipped = max(0, start - (self.sequence - len(self._kept)))
        messages = list(islice(self._kept, skipped, None))
        try:
            for index, (number, payload) in enumerate(messages):
                self._requests.send([identity, b"", number, payload])
                self.replayed += 1
                if index % _BURST == _BURST - 1:
                    await asyncio.sleep(0)
            self._requests.send([identity, b"", END, b""])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # else the consumer has gone, or does not read
                raise


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """Bind the socket and return its address."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise EngineFailure(f"KV-cache events cannot be published on {endpoint}: {error.strerror}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
