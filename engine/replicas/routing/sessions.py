"""Affinity: requests of a session or conversation go to one replica while it is ready, and requests about a stored
response to the replica that stores it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Affinity:
    """Ids that bind a request to a replica. The first one for which the router knows a replica decides."""

    responses: tuple[str, ...] = ()
    """Ids of the stored responses that the request continues or asks for; also of batches, videos and files."""
    conversation: str = ""
    """The conversation that the request continues, or the list of batches that it reads or makes longer, with its
    owner; empty for none."""
    session: str = ""
    """The session that the client names; empty for none."""


class Sessions:
    """The replica of each session and conversation, or of each response; at most `capacity` of them, forgotten
    `seconds` after their last request.
    """

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._seconds = seconds
        self._clock = clock
        self._replicas: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """URL and expiry by the hash of a name, which may be long."""

    def __len__(self) -> int:
        return len(self._replicas)

    def replica(self, session: str) -> str | None:
        """Return the URL of the session's replica, if it has one."""
        found = self._replicas.get(hash(session))
        return found[0] if found is not None and found[1] > self._clock() else None

    def assign(self, session: str, url: str) -> None:
        self._replicas[hash(session)] = (url, self._clock() + self._seconds)
        self._replicas.move_to_end(hash(session))
        while self._replicas and (
            len(self._replicas) > self._capacity or next(iter(self._replicas.values()))[1] <= self._clock()
        ):
            self._replicas.popitem(last=False)
