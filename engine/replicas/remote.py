"""Replicas that work for this one over /prefill or /encode, and the pool that asks them, the cheapest first."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from engine.errors import (
    ContextOverflow,
    EmbeddingsLost,
    EngineDied,
    EngineError,
    EngineFailure,
    EngineNotReady,
    InvalidRequest,
)
from engine.replicas import ask as asking
from engine.replicas.ask import RemoteAnswer, ReplicaFault, Service
from engine.replicas.client import Header
from engine.replicas.discovery import Addresses
from engine.replicas.pool import NoReplica, PoolObserver, ReplicaPool
from engine.replicas.replica import Replica, in_full

I = TypeVar("I", bound=msgspec.Struct)  # noqa: E741
T = TypeVar("T")

log = logging.getLogger(__name__)


class RemoteObserver(PoolObserver, Protocol):
    """Counts what remote replicas do. They are named by their URLs."""

    def answered(self, peer: str, outcome: str, seconds: float) -> None:
        """An attempt has ended: ok, invalid, unavailable, failed, unreachable, silent, refused or cancelled."""

    def computed_locally(self, reason: str) -> None:
        """A request is computed here: its prompt is `short`, there is `no_peer`, or its KV blocks were `lost`."""

    def remote_rows(self, outcome: str) -> None:
        """Embeddings that stayed with an encode replica are no longer needed: `released`, or `lost` to an engine that
        could not read them."""

    def available(self, peer: str, available: bool) -> None:
        """Whether a replica takes requests."""

    def gone(self, peer: str) -> None:
        """A replica has left; nothing more is reported of it."""


class RemoteReplica(Replica, Generic[I, T]):
    """The replica at `url` that answers `service`. `headers` go with each request."""

    service: Service[I, T]

    def __init__(self, url: str, headers: Sequence[Header], observer: RemoteObserver) -> None:
        super().__init__(url, f"{self.service.name} replica {url}")
        self.in_flight = 0
        """Work that was sent there and is not answered yet: prompt tokens, or images."""
        self.info: I | None = None
        """The last description that it gave of itself."""
        self._headers = headers
        self._observer = observer

    async def ask(
        self,
        body: Sequence[bytes],
        request_id: str,
        work: int,
        take: Callable[[T], Awaitable[bool]] = asking.only,
    ) -> RemoteAnswer[T]:
        """Send a request. `work` is how much of it there is. `take` and errors are those of `ask.ask`."""
        started = time.perf_counter()
        outcome = "cancelled"
        self.in_flight += work
        try:
            headers = [*self._headers, (b"x-request-id", request_id.encode())]
            answer = await asking.ask(self.client, self.service, body, headers, take)
            outcome = "ok"
            return answer
        except EngineError as error:
            outcome = _outcome(error)
            if isinstance(error, ReplicaFault | EngineNotReady | EngineDied):
                self.fail(error)
            raise
        finally:
            self.in_flight -= work
            if not self.left:
                self._observer.answered(self.url, outcome, time.perf_counter() - started)

    async def probe(self) -> None:
        try:
            self.info = await asking.describe(self.client, self.service, self._headers)
        except Exception:
            self.breaker.fail()
            raise

    def set_ready(self) -> None:
        super().set_ready()
        self.breaker.succeed()

    def report(self) -> None:
        self._observer.available(self.url, self.available)

    def leave(self) -> None:
        if not self.left:
            self._observer.gone(self.url)
        super().leave()


R = TypeVar("R", bound=RemoteReplica[Any, Any])


class RemotePool(ReplicaPool[R]):
    """The replicas of `kind` at `urls`.

    `mine`, in the methods, is what a replica must have in common with this one.
    """

    kind: type[R]
    observer: RemoteObserver

    def __init__(self, urls: Sequence[str], secret: str, attempts: int, observer: RemoteObserver) -> None:
        self._does = self.kind.service.name
        super().__init__(Addresses(urls, self._does), attempts, observer)
        self._headers = [(b"authorization", b"Bearer " + secret.encode()), (b"accept-encoding", b"identity")]

    def healthy(self, mine: msgspec.Struct) -> bool:
        """Whether a request made now would be sent somewhere."""
        return any(not self.obstacle(replica, mine) for replica in self.replicas)

    def obstacle(self, replica: R, mine: msgspec.Struct) -> str:
        """Reason why `replica` cannot be asked; empty if it can."""
        if not replica.available or replica.info is None:
            return replica.reason
        pairs = ((name, getattr(replica.info, name), getattr(mine, name)) for name in mine.__struct_fields__)
        return "; ".join(
            f"one has {name} {theirs or 'none'}, this replica has {ours or 'none'}"
            for name, theirs, ours in pairs
            if theirs != ours
        )

    async def try_in_turn(
        self, mine: msgspec.Struct, name: str, cost: Callable[[R], int], ask: Callable[[R], Awaitable[T]]
    ) -> T:
        """Ask one replica after the other, the one with the least cost first, of equals the one asked longest ago.

        Raises the error of a wrong request, the last failure that another attempt may not meet, or NoReplica. `name` is
        the request's, for the log.
        """
        failure: EngineError | None = None
        for replica in self.in_turn(
            usable=lambda one: not self.obstacle(one, mine),
            choose=lambda candidates: min(candidates, key=lambda one: (cost(one), one.last_asked)),
        ):
            try:
                return await ask(replica)
            except EngineError as error:
                if is_final(error):
                    raise
                log.info("%s cannot %s %s: %s", replica.name, self._does, name, in_full(error))
                if failure is None or not isinstance(error, ContextOverflow):  # another attempt may succeed
                    failure = error
        raise failure or self._nobody(name, mine)

    def _new(self, url: str) -> R:
        return self.kind(url, self._headers, self.observer)

    def _nobody(self, name: str, mine: msgspec.Struct) -> NoReplica:
        """Reason why there is no replica to ask. Addresses are for the log alone."""
        found = {replica.url: self.obstacle(replica, mine) for replica in self.replicas}
        log.info("no %s replica for %s: %s", self._does, name, found)
        reasons = "; ".join(sorted(set(found.values()))) or "none is known"
        return NoReplica(f"no {self._does} replica can take the request: {reasons}")


def is_final(error: EngineError) -> bool:
    """Whether asking another replica is of no use. One without room for a request does not speak for the others."""
    return isinstance(error, EmbeddingsLost) or (
        isinstance(error, InvalidRequest) and not isinstance(error, ContextOverflow)
    )


def _outcome(error: EngineError) -> str:
    if isinstance(error, ReplicaFault):
        return error.outcome
    if isinstance(error, InvalidRequest):
        return "invalid"
    return "failed" if isinstance(error, EngineFailure) else "unavailable"
