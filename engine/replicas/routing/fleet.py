"""All replicas behind a router: found, watched, listened to, and chosen among."""

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineUnavailable
from engine.replicas.discovery import RESOLVE_SECONDS, Addresses, wait_for_first
from engine.replicas.publisher.zmq_channel import of_rank
from engine.replicas.routing.index import PrefixIndex
from engine.replicas.routing.load import UNKNOWN_TOKENS, Work
from engine.replicas.routing.policy import Candidate, Policy
from engine.replicas.routing.replica import SILENCE_SECONDS, Learner, Observer, Replica
from engine.replicas.routing.sessions import Sessions
from engine.replicas.routing.subscriber import Subscriber
from engine.replicas.routing.upstream import Header

log = logging.getLogger(__name__)


class NoReplica(EngineUnavailable):
    """None takes requests, or none that was asked did."""


@dataclass(frozen=True, slots=True)
class EventSources:
    """Where replicas publish their KV events: one endpoint for each fixed URL in their order, or the URL's host with these ports."""

    endpoints: tuple[str, ...] = ()
    replays: tuple[str, ...] = ()
    port: int = 5557
    """0 listens to none."""
    replay_port: int = 0
    """0 has none."""
    topic: str = ""

    def of(self, url: str, place: int | None) -> tuple[str, str]:
        """Endpoint and replay endpoint of the replica at `url`, the one of this `place` in the settings; empty for none."""
        if place is not None and self.endpoints:
            return self.endpoints[place], self.replays[place] if self.replays else ""
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        replay = f"tcp://{host}:{self.replay_port}" if self.port and self.replay_port else ""
        return f"tcp://{host}:{self.port}" if self.port else "", replay


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a request's prompt: its tokens, up to its first image, and who may share blocks with it."""

    tokens: Sequence[int] = ()
    namespace: tuple[str, str] = ("", "")
    count: int = UNKNOWN_TOKENS
    """Tokens of the whole prompt, as far as known."""


class Fleet:
    """The replicas at `addresses`. `attempts`: most that are asked for one request."""

    def __init__(
        self,
        addresses: Addresses,
        sources: EventSources,
        policy: Policy,
        observer: Observer,
        headers: Sequence[Header] = (),
        attempts: int = 3,
        sessions: Sessions | None = None,
    ) -> None:
        self.attempts, self.observer = attempts, observer
        self._addresses, self._sources, self._policy, self._headers = addresses, sources, policy, headers
        self._sessions = sessions or Sessions(1 << 16, 3600.0)
        self._index = PrefixIndex()
        self._replicas: dict[str, Replica] = {}
        self._learning: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._resolving: asyncio.Task[None] | None = None
        self._asked = 0

    @property
    def healthy(self) -> bool:
        """Whether a request made now would be sent somewhere."""
        return any(replica.available for replica in self._replicas.values())

    @property
    def replicas(self) -> Collection[Replica]:
        return self._replicas.values()

    @property
    def index(self) -> PrefixIndex:
        return self._index

    async def start(self) -> None:
        """Find the replicas, and wait a moment for each to say that it is there."""
        self._keep(await self._addresses.find(set()))
        if self._addresses.change:
            self._resolving = asyncio.create_task(self._resolve(), name="replica-discovery")
        await wait_for_first((replica.probed for replica in self._replicas.values()), SILENCE_SECONDS)

    async def close(self) -> None:
        """Answers that are on their way break off. Idempotent."""
        if self._resolving is not None:
            self._resolving.cancel()
            await asyncio.wait([self._resolving])
            self._resolving = None
        self._keep([])
        if tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def choose(self, prompt: Prompt, session: str, tried: Collection[Replica]) -> tuple[Replica, Work]:
        """A replica for a request, and its work there, which the caller ends. Raises NoReplica."""
        started = time.perf_counter()
        free = {
            replica.number: replica for replica in self._replicas.values() if replica.available and replica not in tried
        }
        if not free:
            raise NoReplica("No replica is ready." if not tried else "No replica could answer.")
        overlaps = (
            self._index.overlaps(prompt.tokens, prompt.namespace) if prompt.tokens and self._policy.name == "kv" else {}
        )
        replica = self._of_session(session, free.values())
        if replica is None:
            candidates = [Candidate(number, replica.load, replica.last_asked) for number, replica in free.items()]
            replica = free[self._policy.choose(candidates, prompt.count, overlaps).replica]
        if session:
            self._sessions.assign(session, replica.url)
        self._asked += 1
        replica.last_asked = self._asked
        overlap = min(overlaps.get(replica.number, 0), prompt.count - 1)
        self.observer.chosen(replica.number, len(prompt.tokens), overlap, time.perf_counter() - started)
        return replica, Work(replica.load, prompt.count, overlap)

    def _of_session(self, session: str, free: Collection[Replica]) -> Replica | None:
        url = self._sessions.replica(session) if session else None
        found = next((replica for replica in free if replica.url == url), None)
        if found is not None:
            self.observer.affine()
        return found

    def _keep(self, urls: Sequence[str]) -> None:
        """Have the replicas at `urls`, and no others; what others are at goes on."""
        for url in self._replicas.keys() - set(urls):
            replica = self._replicas.pop(url)
            replica.leave()
            if (learning := self._learning.pop(url, None)) is not None:
                learning.cancel()
            self._index.remove(replica.number)
            self.observer.gone(replica.number)
        for url in urls:
            if url not in self._replicas:
                self._add(url)

    def _add(self, url: str) -> None:
        taken = {replica.number for replica in self._replicas.values()}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        replica = self._replicas[url] = Replica(number, url, self._index, self.observer, self._headers)
        self._run(replica.watch(), replica)
        place = self._addresses.fixed.index(url) if url in self._addresses.fixed else None
        endpoint, replay = self._sources.of(url, place)
        if endpoint and self._policy.name == "kv":
            self._learning[url] = self._run(self._learn(replica, endpoint, replay), replica)

    def _run(self, work: Coroutine[Any, Any, None], replica: Replica) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"replica-{replica.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report)
        return task

    async def _learn(self, replica: Replica, endpoint: str, replay: str) -> None:
        """Listen to the first rank of a replica, and to the others once it says that it has some; what any of them has, it has."""

        def listen(rank: int) -> Coroutine[Any, Any, None]:
            learner = Learner(replica.number, rank, self._index, self.observer)
            return Subscriber(
                of_rank(endpoint, rank), of_rank(replay, rank) if replay else "", self._sources.topic, learner
            ).run()

        async with asyncio.TaskGroup() as group:
            group.create_task(listen(0))
            for rank in range(1, await replica.ranks()):
                group.create_task(listen(rank))

    async def _resolve(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_SECONDS)
            found = await self._addresses.find(self._replicas.keys())
            if gone := self._replicas.keys() - set(found):
                log.info("replicas no more: %s", ", ".join(sorted(gone)))
            self._keep(found)


def _report(task: asyncio.Task[None]) -> None:
    """What watches a replica goes on for as long as it is one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s is not watched any more", task.get_name(), exc_info=error)
