"""Messages to a NATS server: the payload as it is, its sequence number and rank in headers."""

import asyncio
import logging
from collections import deque

from engine.errors import EngineFailure
from engine.replicas.publisher.sink import Message

_RECONNECT_SECONDS = 1
_CONNECT_SECONDS = 2

log = logging.getLogger(__name__)


class NatsSink:
    """A `Sink` that publishes on one subject, and connects again whenever the connection is lost.

    Meanwhile at most `capacity` messages wait; the oldest are dropped. Messages on their way when a connection breaks
    may be lost too.
    """

    name = "nats"

    def __init__(self, url: str, subject: str, capacity: int) -> None:
        """Raises EngineFailure if nats-py is not installed."""
        try:
            from nats.aio.client import Client  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise EngineFailure("NATS_URL needs nats-py: pip install 'trellis[nats]'") from error
        self.sent = 0
        self.dropped = 0
        self._url = url
        self._subject = subject
        self._client = Client()
        self._waiting: deque[Message] = deque(maxlen=capacity)
        self._wake = asyncio.Event()
        self._problem = ""

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def send(self, message: Message) -> None:
        self.dropped += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Connect and send, until cancelled. Raises EngineFailure if the server closes the connection for good."""
        try:
            await self._client.connect(
                self._url,
                name="trellis",
                connect_timeout=_CONNECT_SECONDS,
                reconnect_time_wait=_RECONNECT_SECONDS,
                max_reconnect_attempts=-1,
                error_cb=self._failed,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._closed,
            )
            while not self._client.is_closed:
                while self._waiting and self._client.is_connected:
                    await self._publish(self._waiting.popleft())
                await self._wake.wait()
                self._wake.clear()
            raise EngineFailure("the NATS server has ended the connection for good")
        finally:
            await self._client.close()

    async def _publish(self, message: Message) -> None:
        if len(message.payload) > self._client.max_payload:
            self.dropped += 1
            log.warning(
                "NATS: dropped a message of %d bytes: the server takes at most %d",
                len(message.payload),
                self._client.max_payload,
            )
            return
        headers = {"sequence": str(message.sequence), "rank": str(message.rank)}
        await self._client.publish(self._subject, message.payload, headers=headers)
        self.sent += 1

    async def _failed(self, error: Exception) -> None:
        """Log an error once: each attempt to connect fails the same way."""
        problem = f"{type(error).__name__}: {error}"
        if problem != self._problem:
            log.warning("NATS: %s", problem)
        self._problem = problem

    async def _disconnected(self) -> None:
        log.warning("NATS: the connection was lost")

    async def _reconnected(self) -> None:
        self._problem = ""
        log.info("NATS: connected again")
        self._wake.set()

    async def _closed(self) -> None:
        self._wake.set()
