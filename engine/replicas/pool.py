"""The replicas of one kind: found by address or DNS name, probed, and tried in turn.

Subclasses say what replicas are asked, and by which policy one is chosen: prefill replicas by what they have to
compute, encode replicas by what they are busy with, those behind a router by both.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from engine.errors import EngineUnavailable
from engine.kit.tasks import cancel
from engine.replicas.discovery import RESOLVE_SECONDS, Addresses
from engine.replicas.replica import Replica

FIRST_PROBE_SECONDS = 5.0
"""Seconds that `start` waits for the first probes."""

R = TypeVar("R", bound=Replica)

log = logging.getLogger(__name__)


class NoReplica(EngineUnavailable):
    """No replica can be asked, or none did what it was asked."""


class PoolObserver(Protocol):
    """Counts what happens in a pool."""

    def retried(self) -> None:
        """A request goes to another replica."""


class ReplicaPool(Generic[R]):
    """The replicas at `addresses`. At most `attempts` of them are asked for one request."""

    def __init__(self, addresses: Addresses, attempts: int, observer: PoolObserver) -> None:
        self._addresses = addresses
        self._attempts = attempts
        self.observer = observer
        self._chosen = 0
        self._replicas: dict[str, R] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def replicas(self) -> Collection[R]:
        return self._replicas.values()

    @property
    def counts(self) -> tuple[int, int]:
        """Replicas that are known, and those of them that are available."""
        return len(self._replicas), sum(replica.available for replica in self._replicas.values())

    @property
    def missing(self) -> str:
        """Reason why no replica is available, for clients; empty if one is."""
        known, available = self.counts
        if available:
            return ""
        counts = Counter(replica.reason for replica in self.replicas)
        reasons = "; ".join(
            f"each of {count} {reason.removeprefix('one ')}" if count > 1 else reason
            for reason, count in sorted(counts.items())
        )
        return f"No replica is ready, of {known}: {reasons}." if known else "No replica is known."

    async def start(self) -> None:
        """Find the replicas, and wait a moment for the first probe of each. Log that none is ready, if none is."""
        self.update(await self._addresses.find(set()))
        if self._addresses.change:
            self._run(self._resolve(), "replica-discovery")
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PROBE_SECONDS):
                for replica in list(self._replicas.values()):
                    await replica.probed.wait()
        if not self.counts[1]:
            silent = [replica.name for replica in self.replicas if not replica.probed.is_set()]  # others are logged
            unheard = f"; no answer from {', '.join(silent)}" if silent else ""
            log.warning("no replica is ready yet, of %d%s", len(self.replicas), unheard)

    async def close(self) -> None:
        """Forget the replicas. Answers that are on their way break off. Idempotent."""
        for url in list(self._replicas):
            self._remove(url)
        await cancel(self._tasks)

    def update(self, urls: Sequence[str]) -> None:
        """Use the replicas at `urls` and no others. Requests at those that leave go on."""
        for url in self._replicas.keys() - set(urls):
            log.info("removed %s: no longer in DNS or its file", self._replicas[url].name)
            self._remove(url)
        for url in urls:
            if url not in self._replicas:
                self._replicas[url] = replica = self._new(url)
                self._run(replica.watch(), replica.name)

    def in_turn(
        self, usable: Callable[[R], bool], choose: Callable[[list[R]], R], attempts: int | None = None
    ) -> Iterator[R]:
        """Yield replicas for one request, each when the one before has failed; as many `attempts` as the pool's if it
        has none of its own.

        `choose` picks each from the usable ones that have not been tried.
        """
        tried: list[R] = []
        while len(tried) < (self._attempts if attempts is None else attempts):
            candidates = [replica for replica in self._replicas.values() if replica not in tried and usable(replica)]
            if not candidates:
                return
            if tried:
                self.observer.retried()
            replica = choose(candidates)
            self._chosen += 1
            replica.last_asked = self._chosen
            tried.append(replica)
            yield replica

    def _new(self, url: str) -> R:
        raise NotImplementedError

    def _remove(self, url: str) -> R:
        replica = self._replicas.pop(url)
        replica.leave()
        return replica

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task that ends with the pool at the latest."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Log the error of a task that was to run on."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s is no longer watched", task.get_name(), exc_info=error)

    async def _resolve(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_SECONDS)
            self.update(await self._addresses.find(self._replicas.keys()))
