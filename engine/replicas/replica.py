"""Another replica, of any role: probed while it is in use, and left alone while it fails."""

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable
from typing import ClassVar

from engine.errors import EngineError, EngineFailure
from engine.replicas.client import ConnectionFailed, ReplicaClient

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Seconds for which a replica is not asked after its first failure, and at most."""
_HURRIED_SECONDS = 0.1
"""Pause before a probe that `check` asks for."""

log = logging.getLogger(__name__)


class Breaker:
    """The circuit breaker of one replica. It counts failures in a row, and sets a pause after each, twice as long as
    the one before.

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


class Replica:
    """The replica at `url`, `name` in the log.

    It is `available` while its last probe has succeeded and no request has failed through its fault since.
    """

    probe_seconds: ClassVar[float] = 2.0
    """Pause between probes."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.client = ReplicaClient(url)
        self.breaker = Breaker()
        self.last_asked = 0
        """Number of the last choice of this replica: the pool counts its choices."""
        self.reason = "one has not answered yet"
        """Reason why it is not available, for clients: without addresses, which are secret."""
        self.probed = asyncio.Event()
        """Set once the first probe has ended."""
        self.left = False
        self.ready = asyncio.Event()
        self._check = asyncio.Event()
        self._was_ready = False

    @property
    def available(self) -> bool:
        return self.ready.is_set()

    async def probe(self) -> None:
        """Raise EngineError unless the replica takes requests now."""
        raise NotImplementedError

    def report(self) -> None:
        """Update the metrics; called after each probe, and when the replica fails. Not called once it has left."""

    async def watch(self) -> None:
        """Probe until the replica has left and its last request has ended, or until cancelled. Then disconnect."""
        try:
            while not self.left or self.client.requests:
                self._check.clear()
                if not self.breaker.pause:
                    await self._probe()
                    self.probed.set()
                if not self.left:
                    self.report()
                await self._rest()
        finally:
            self.leave()
            self.client.cut("the replica is no longer used")

    def leave(self) -> None:
        """Take no more requests; those that run go on. Idempotent."""
        self.left = True
        self.ready.clear()
        self._check.set()

    def check(self) -> None:
        """Probe soon: something suggests that the replica does not take requests any more."""
        self._check.set()

    def fail(self, error: EngineError) -> None:
        """Note a request that failed through the replica's fault. After a pause a probe decides whether it is used."""
        self.breaker.fail()
        self.set_unready(error)
        self.check()

    def set_ready(self) -> None:
        if not self.available:
            log.info("%s is ready%s", self.name, " again" if self._was_ready else "")
        self._was_ready = True
        self.ready.set()

    def set_unready(self, error: EngineError) -> None:
        if self.left:
            return
        reason = "one cannot be reached" if isinstance(error, ConnectionFailed) else str(error)
        if self.available or reason != self.reason:
            log.warning("%s: %s", self.name, in_full(error))
        self.reason = reason
        self.ready.clear()
        self.report()

    async def _probe(self) -> None:
        try:
            await self.probe()
        except EngineError as error:
            self.set_unready(error)
        except Exception as error:  # a bug here must not end the probes
            log.exception("the probe of %s failed", self.name)
            self.set_unready(EngineFailure(f"a probe failed: {type(error).__name__}"))
        else:
            if not self.left and not self.breaker.pause:  # else a request has failed meanwhile
                self.set_ready()

    async def _rest(self) -> None:
        """Wait until the next probe is due, at most `probe_seconds`."""
        try:
            async with asyncio.timeout(min(self.breaker.pause or self.probe_seconds, self.probe_seconds)):
                await self._check.wait()
            await asyncio.sleep(_HURRIED_SECONDS)
        except TimeoutError:
            return


def in_full(error: EngineError) -> str:
    """Return the error of one replica with its cause, for a line of the log that begins with the replica's name."""
    text = re.sub("^one ", "it ", str(error))
    cause = error.__cause__
    return text if cause is None or str(cause) in text else f"{text} ({cause!r})"
