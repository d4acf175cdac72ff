"""Session affinity: requests of a session go to one replica while it is ready and the session goes on."""

import time
from collections import OrderedDict
from collections.abc import Callable


class Sessions:
    """The replica of each session; at most `capacity` of them, forgotten `seconds` after their last request."""

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._seconds = seconds
        self._clock = clock
        self._replicas: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """URL and expiry by the hash of the session's name, which may be long."""

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
