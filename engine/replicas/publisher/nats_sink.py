"""The same messages to a NATS server: the payload as it is, its sequence number and rank in headers."""

import asyncio
import logging
from collections import deque
from typing import NamedTuple

from engine.errors import EngineFailure

_RECONNECT_SECONDS = 1
_CONNECT_SECONDS = 2

log = logging.getLogger(__name__)


class _Message(NamedTuple):
    payload: bytes
    headers: dict[str, str]


class NatsSink:
    """Sends while it is connected, and connects again for as long as it lives. Meanwhile at most `capacity` messages wait; the oldest are
    dropped, which a consumer sees by the sequence numbers. What is on its way when a connection breaks may be lost too."""

    def __init__(self, url: str, subject: str, capacity: int) -> None:
        """Raises EngineFailure if nats-py is not installed."""
        try:
            from nats.aio.client import Client  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise EngineFailure("NATS_URL needs nats-py: pip install 'trellis[nats]'") from error
        self.sent = self.dropped = 0
        self._url = url
        self._subject = subject
        self._client = Client()
        self._waiting: deque[_Message] = deque(maxlen=capacity)
        self._wake = asyncio.Event()
        self._problem = ""

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def waiting(self) -> int:
        """Messages that are not sent yet."""
        return len(self._waiting)

    def send(self, payload: bytes, sequence: int, rank: int) -> None:
        """Have a message sent; never waits."""
        self.dropped += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(_Message(payload, {"sequence": str(sequence), "rank": str(rank)}))
        self._wake.set()

    async def run(self) -> None:
        """Connect and send, until cancelled. Raises EngineFailure if the server refuses us for good."""
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

    async def _publish(self, message: _Message) -> None:
        if len(message.payload) > self._client.max_payload:
            self.dropped += 1
            log.warning(
                "NATS: a message of %d bytes is larger than the server takes, %d",
                len(message.payload),
                self._client.max_payload,
            )
            return
        await self._client.publish(self._subject, message.payload, headers=message.headers)
        self.sent += 1

    async def _failed(self, error: Exception) -> None:
        """Each attempt to connect fails the same way: said once."""
        problem = f"{type(error).__name__}: {error}"
        if problem != self._problem:
            log.warning("NATS: %s", problem)
        self._problem = problem

    async def _disconnected(self) -> None:
        log.warning("NATS: the connection is lost")

    async def _reconnected(self) -> None:
        self._problem = ""
        log.info("NATS: connected again")
        self._wake.set()

    async def _closed(self) -> None:
        self._wake.set()
