"""Another replica, whatever it does for this one: probed while it is in use, and left alone while it fails."""

import asyncio
import logging
import re
from typing import ClassVar

from engine.errors import EngineError, EngineFailure
from engine.replicas.breaker import Breaker
from engine.replicas.client import ConnectionFailed, ReplicaClient

_HURRIED_SECONDS = 0.1
"""Pause before a probe that `check` asks for."""

log = logging.getLogger(__name__)


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
