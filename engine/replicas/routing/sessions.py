"""Session affinity: requests of one session go to one replica for as long as it is there and the session goes on."""

import time
from collections import OrderedDict
from collections.abc import Callable


class Sessions:
    """The replica of each session; at most `capacity` of them, forgotten `seconds` after their last request."""

    def __init__(self, capacity: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._seconds, self._clock = capacity, seconds, clock
        self._replicas: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """URL and expiry by the session's hash: a name from a client may be long."""

    def __len__(self) -> int:
        return len(self._replicas)

    def replica(self, session: str) -> str | None:
        """URL of its replica, if it has one."""
        found = self._replicas.get(hash(session))
        return found[0] if found is not None and found[1] > self._clock() else None

    def assign(self, session: str, url: str) -> None:
        self._replicas[hash(session)] = (url, self._clock() + self._seconds)
        self._replicas.move_to_end(hash(session))
        while self._replicas and (
            len(self._replicas) > self._capacity or next(iter(self._replicas.values()))[1] <= self._clock()
        ):
            self._replicas.popitem(last=False)
