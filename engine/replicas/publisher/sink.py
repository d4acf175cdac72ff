"""The seam between the publisher and the buses that carry its messages.

A new bus is a module with a `Sink`, its setting (read in `server/compose/publishing.py`), and its name in `BUSES`.
"""

from typing import NamedTuple, Protocol

BUSES = ("nats",)
"""Names of all sinks but ZMQ, for metrics."""


class Message(NamedTuple):
    """Events of one data-parallel rank, encoded."""

    payload: bytes
    rank: int
    sequence: int
    """Number of the message among those of its rank, from 0."""
    is_whole: bool
    """Whether it tells, with the messages after it, of all blocks: those before it are not needed."""


class Sink(Protocol):
    """Sends messages somewhere, in order. It drops those that it cannot send in time: consumers see the gaps."""

    name: str
    dropped: int
    """Messages that were not sent."""

    @property
    def waiting(self) -> int:
        """Messages that are not sent yet."""
        ...

    def send(self, message: Message) -> None:
        """Have a message sent; never waits."""

    async def run(self) -> None:
        """Send until cancelled, or return if `send` does all. Raises EngineFailure if it can send no more."""
