"""The seam between the publisher and the buses that carry its messages. A new bus is a module with a `Sink`, a setting, and its name in `BUSES`."""

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
    """Sends messages somewhere, in order. What it cannot send in time it drops; consumers see gaps in the sequence numbers."""

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
        """Send until cancelled, or return if `send` does all. Raises EngineFailure when nothing can be sent any more."""

    def close(self) -> None:
        """Release what `run` does not. Called once, after `run` has ended."""
