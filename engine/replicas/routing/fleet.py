"""The replicas behind a router: watched, listened to, and chosen among."""

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from engine.replicas.client import Header
from engine.replicas.discovery import Addresses
from engine.replicas.pool import PoolObserver, ReplicaPool
from engine.replicas.publisher.zmq_sink import of_rank
from engine.replicas.routing.events import CacheEvent
from engine.replicas.routing.index import PrefixIndex
from engine.replicas.routing.load import UNKNOWN_TOKENS, Assignment
from engine.replicas.routing.policy import Policy
from engine.replicas.routing.replica import RoutedRank, RoutedReplica
from engine.replicas.routing.sessions import Affinity, Sessions
from engine.replicas.routing.subscriber import EventCounts, Subscriber

_NO_AFFINITY = Affinity()


@dataclass(frozen=True, slots=True)
class EventSources:
    """Endpoints of replicas' KV events: one for each fixed URL, or its host with these ports."""

    endpoints: tuple[str, ...] = ()
    replays: tuple[str, ...] = ()
    port: int = 0
    """0 for none."""
    replay_port: int = 0
    """0 for none."""
    topic: str = ""

    def of(self, url: str, place: int | None) -> tuple[str, str]:
        """Return endpoint and replay endpoint of the replica at `url`, empty for none.

        `place` is that of its URL among the fixed ones, if it is one.
        """
        if place is not None and self.endpoints:
            return self.endpoints[place], self.replays[place] if self.replays else ""
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        replay = f"tcp://{host}:{self.replay_port}" if self.port and self.replay_port else ""
        return f"tcp://{host}:{self.port}" if self.port else "", replay


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt as a router knows it: its tokens up to the first image, and which requests may share its blocks."""

    tokens: Sequence[int] = ()
    namespace: tuple[str, str] = ("", "")
    """Cache salt and LoRA adapter."""
    count: int = UNKNOWN_TOKENS
    """Tokens of the whole prompt, as far as known."""


class RoutingObserver(PoolObserver, Protocol):
    """Counts requests. Replicas are numbers."""

    def answered(self, replica: int, outcome: str) -> None:
        """An attempt has ended: ok, error, refused, unreachable, lost (in the middle of its answer) or cancelled."""

    def chosen(self, replica: int, prompt: int, overlap: int, seconds: float) -> None:
        """A replica was chosen in `seconds`; its cache has `overlap` of the `prompt` tokens known of the request."""

    def tokenised(self, seconds: float) -> None:
        """A prompt was rendered and tokenised."""

    def affine(self) -> None:
        """A request goes where its session is."""


class Fleet(ReplicaPool[RoutedReplica]):
    """The replicas at `addresses`, chosen by `policy`. `headers` go with probes."""

    observer: RoutingObserver

    def __init__(
        self,
        addresses: Addresses,
        sources: EventSources,
        policy: Policy,
        observer: RoutingObserver,
        headers: Sequence[Header] = (),
        attempts: int = 3,
        sessions: Sessions | None = None,
        makers: Sessions | None = None,
    ) -> None:
        """`makers` are the replicas of responses: a table of its own, since there are many, which would push sessions
        out, while a response that is not in it is found by asking all replicas.
        """
        super().__init__(addresses, attempts, observer)
        self.index = PrefixIndex()
        self.event_counts: defaultdict[int, EventCounts] = defaultdict(EventCounts)
        """Counts by replica number. A replica may inherit the number of one that has left."""
        self._sources = sources
        self._policy = policy
        self._headers = headers
        self._sessions = Sessions(1 << 16, 3600.0) if sessions is None else sessions
        self._makers = Sessions(1 << 16, 3600.0) if makers is None else makers
        self._numbers: set[int] = set()
        """Numbers of ranks in the index."""

    @property
    def healthy(self) -> bool:
        """Whether a request made now would be sent somewhere."""
        return any(replica.available for replica in self.replicas)

    def assign(
        self, prompt: RoutedPrompt, affinity: Affinity = _NO_AFFINITY
    ) -> Iterator[tuple[RoutedRank, Assignment]]:
        """Yield a rank of a replica for a request, each when the one before has failed, and the work assigned to it.
        Requests about stored responses may try all replicas, since any of them may store one.

        The caller ends the work.
        """
        overlap = 0
        chosen: RoutedRank
        attempts = max(self._attempts, len(self._replicas)) if affinity.responses else self._attempts

        def choose(candidates: list[RoutedReplica]) -> RoutedReplica:
            nonlocal overlap, chosen
            started = time.perf_counter()
            overlaps = self.index.overlaps(prompt.tokens, prompt.namespace) if self._policy.name == "kv" else {}
            url = self._home(affinity)
            known = [candidate for candidate in candidates if candidate.url == url]
            if known:
                self.observer.affine()
            elif affinity.conversation:  # every router chooses the same
                known = [max(candidates, key=lambda one: _digest(affinity.conversation, one.url))]
            ranks = [rank for replica in known or candidates for rank in replica.ranks]
            chosen = self._policy.choose(ranks, prompt.count, overlaps)
            replica = chosen.replica
            for name in _lasting(affinity):
                self._sessions.assign(name, replica.url)
            overlap = min(overlaps.get(chosen.number, 0), prompt.count - 1)
            self.observer.chosen(replica.number, len(prompt.tokens), overlap, time.perf_counter() - started)
            return replica

        for _ in self.in_turn(lambda one: one.available, choose, attempts):
            yield chosen, Assignment(chosen.load, prompt.count, overlap)

    def stored(self, response: str, replica: RoutedReplica) -> None:
        """Note which replica has made a response."""
        self._makers.assign(response, replica.url)

    def is_away(self, affinity: Affinity) -> bool:
        """Tell whether the replica that has made a response is known, and takes no requests now."""
        url = self._home(Affinity(affinity.responses))
        return url is not None and not any(one.url == url and one.available for one in self.replicas)

    def _home(self, affinity: Affinity) -> str | None:
        """Return the URL of the replica that a request is tied to, if it is known."""
        made = map(self._makers.replica, affinity.responses)
        return next((url for url in (*made, *map(self._sessions.replica, _lasting(affinity))) if url is not None), None)

    def blocks(self, replica: RoutedReplica) -> int:
        """Return how many blocks of a replica are known, of all its ranks."""
        return sum(self.index.blocks(rank.number) for rank in replica.ranks)

    def _new(self, url: str) -> RoutedReplica:
        taken = {replica.number for replica in self.replicas}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        replica = RoutedReplica(number, url, self._headers)
        self._add_rank(replica)
        place = self._addresses.fixed.index(url) if url in self._addresses.fixed else None
        endpoint, replay = self._sources.of(url, place)
        if endpoint and self._policy.name == "kv":
            replica.learning = self._run(self._learn(replica, endpoint, replay), replica.name)
        return replica

    def _remove(self, url: str) -> RoutedReplica:
        replica = super()._remove(url)
        if replica.learning is not None:
            replica.learning.cancel()
        for rank in replica.ranks:
            self.index.remove(rank.number)
            self._numbers.discard(rank.number)
        return replica

    def _add_rank(self, replica: RoutedReplica) -> RoutedRank:
        number = next(number for number in range(len(self._numbers) + 1) if number not in self._numbers)
        self._numbers.add(number)
        rank = RoutedRank(replica, len(replica.ranks), number)
        replica.ranks.append(rank)
        return rank

    async def _learn(self, replica: RoutedReplica, endpoint: str, replay: str) -> None:
        """Listen to the replica's first rank, and to the others once it says that it has some."""
        counts = self.event_counts[replica.number]

        async def listen(rank: RoutedRank) -> None:
            def apply(event: CacheEvent) -> None:
                counts.unattached += self.index.apply(rank.number, event)

            own = (of_rank(endpoint, rank.rank), of_rank(replay, rank.rank))
            await Subscriber(*own, self._sources.topic, rank.rank, apply, counts).run()

        async with asyncio.TaskGroup() as group:
            group.create_task(listen(replica.ranks[0]))
            for _ in range(1, await replica.count_ranks()):
                group.create_task(listen(self._add_rank(replica)))


def _lasting(affinity: Affinity) -> list[str]:
    """Return the names of what stays with the replica that a request goes to."""
    named = (("conversation", affinity.conversation), ("session", affinity.session))
    return [f"{kind} {name}" for kind, name in named if name]


def _digest(name: str, url: str) -> bytes:
    return hashlib.sha256(f"{name} {url}".encode()).digest()
