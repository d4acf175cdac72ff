"""The circuit breaker of one replica."""

import random
import time
from collections.abc import Callable

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0


class Breaker:
    """Counts failures in a row, and sets a pause after each, twice as long as the one before.

    During the pause the replica is not asked; then a probe decides.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = FIRST_PAUSE
        self._until = 0.0

    @property
    def pause(self) -> float:
        """Seconds until the replica may be probed; 0 if it may be now."""
        return max(self._until - self._clock(), 0.0)

    def succeed(self) -> None:
        """Forget all failures, so that the next one counts as the first."""
        self._next = FIRST_PAUSE
        self._until = 0.0

    def fail(self) -> None:
        """Begin a pause. Failures during a pause do not count: a replica that dies with many requests fails once."""
        if self.pause:
            return
        self._until = self._clock() + self._next * random.uniform(0.8, 1.2)
        self._next = min(2 * self._next, LONGEST_PAUSE)
