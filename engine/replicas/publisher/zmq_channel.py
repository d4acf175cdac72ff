"""One data-parallel rank's messages over ZMQ: published as they come, and sent again to who has missed some.

A message is three frames: topic, sequence number (8 bytes, big-endian, from 0), payload. Who asks the replay socket for those from a
number on (`[empty, number]`, from a DEALER) gets `[empty, number, payload]` for each that is still kept, and then END with no payload.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

import zmq

from engine.errors import EngineFailure
from engine.process.sockets import LoopSocket, context

END = b"\xff" * 8
"""In the place of a sequence number: there are no more messages."""
_HIGH_WATER_MARK = 1000
"""Messages that wait for a slow subscriber before it misses some; it can have them sent again."""
_KEPT_BYTES = 64 << 20
"""Of the messages that are kept to be sent again, however many they may be."""
_LARGEST_REQUEST = 1024
"""Bytes of what consumers send: topics that they subscribe to, and sequence numbers."""
_BURST = 64
"""Messages sent again before other work gets its turn."""


def of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: the next ports, or a path with a suffix. Port 0 takes a free one."""
    if rank == 0 or endpoint.endswith(":0"):
        return endpoint
    if endpoint.startswith("tcp://"):
        address, _, port = endpoint.rpartition(":")
        return f"{address}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


class ZmqChannel:
    """Bound sockets of one rank. `replay` is empty for none; at most `capacity` messages are kept for it. `on_late` is called when somebody
    asks for one that is kept no more, and those that are do not tell of everything without it.
    """

    def __init__(
        self, endpoint: str, replay: str, topic: str, capacity: int, on_late: Callable[[], object] = lambda: None
    ) -> None:
        self.sequence = 0
        """Number of the next message."""
        self.whole_from = 0
        """Number of a message that tells of everything with those after it, whatever was before."""
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
        self._router: zmq.Socket[bytes] | None = None
        self._replays: dict[bytes, asyncio.Task[None]] = {}
        try:
            self.endpoint = _bind(self._publisher, endpoint)
            self.replay_endpoint = ""
            if replay:
                self._router = context().socket(zmq.ROUTER)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._router.setsockopt(zmq.SNDHWM, capacity + 1)
                self._router.setsockopt(zmq.MAXMSGSIZE, _LARGEST_REQUEST)
                self.replay_endpoint = _bind(self._router, replay)
                self._requests = LoopSocket(self._router, self._replay)
        except EngineFailure:
            self.close()
            raise

    def send(self, payload: bytes) -> None:
        """Publish a message; never waits."""
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
        if self._router is not None:
            if self.replay_endpoint:
                self._requests.close()
            self._router.close(linger=0)
        self._publisher.close(linger=0)

    def _replay(self, frames: list[bytes]) -> None:
        """Begin to answer a consumer, and no longer answer what it asked before."""
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
        skipped = max(0, start - (self.sequence - len(self._kept)))
        messages = list(islice(self._kept, skipped, None))
        for index, (number, payload) in enumerate(messages):
            if not self._answer([identity, b"", number, payload]):
                return
            self.replayed += 1
            if index % _BURST == _BURST - 1:
                await asyncio.sleep(0)
        self._answer([identity, b"", END, b""])

    def _answer(self, frames: list[bytes]) -> bool:
        """Whether the consumer takes it: it has not gone, and reads."""
        try:
            self._requests.send(frames)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """The address that the socket is bound to then."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise EngineFailure(f"KV-cache events cannot be published on {endpoint}: {error.strerror}") from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
