"""One replica behind a router: whether it is ready, and how busy it is."""

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from engine.errors import EngineNotReady, EngineUnavailable
from engine.replicas.client import AnswerTooLong, ConnectionFailed, Header
from engine.replicas.replica import Replica
from engine.replicas.routing.load import Load

SILENCE_SECONDS = 5.0
"""Seconds that a probe may take; without an answer in twice that time, all requests to the replica fail."""


class _RuntimeInfo(msgspec.Struct):
    data_parallel_size: int | None = 1
    """Number of data-parallel ranks; None before the engine has started."""


class _InfoAnswer(msgspec.Struct):
    """The part of a replica's /server_info that the router reads."""

    runtime: _RuntimeInfo


_info = msgspec.json.Decoder(_InfoAnswer)


class RoutedRank:
    """A data-parallel rank of a replica: what a policy chooses among. `number` is its own in the index of blocks."""

    __slots__ = ("load", "number", "rank", "replica")

    def __init__(self, replica: "RoutedReplica", rank: int, number: int) -> None:
        self.replica = replica
        self.rank = rank
        self.number = number
        self.load = Load()

    @property
    def last_asked(self) -> int:
        return self.replica.last_asked

    @property
    def wanted(self) -> int | None:
        """The rank to name in a request; None where there is no choice."""
        return self.rank if len(self.replica.ranks) > 1 else None


class RoutedReplica(Replica):
    """The replica `number` at `url`. `headers` go with its probes."""

    probe_seconds: ClassVar[float] = 1.0

    def __init__(self, number: int, url: str, headers: Sequence[Header]) -> None:
        super().__init__(url, f"replica {number} at {url}")
        self.number = number
        self.ranks: list[RoutedRank] = []
        """The ranks that are known, the first from the start."""
        self.learning: asyncio.Task[None] | None = None
        """Listens to its KV events."""
        self._headers = headers
        self._heard = time.monotonic()
        """Time of its last answer to a probe."""

    async def probe(self) -> None:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                status, _ = await self.client.get(b"/health/ready", self._headers)
        except (TimeoutError, ConnectionFailed) as error:
            if time.monotonic() - self._heard >= 2 * SILENCE_SECONDS:  # a lost host does not end its connections
                self.client.cut("the replica has been silent for too long")
            if isinstance(error, ConnectionFailed):
                raise
            raise EngineUnavailable(f"one has been silent for {SILENCE_SECONDS:g} s") from None
        self._heard = time.monotonic()
        if status != 200:
            raise EngineNotReady(f"one answers {status} when asked whether it is ready")

    @property
    def load(self) -> Load:
        """The work of all its ranks."""
        loads = [rank.load for rank in self.ranks]
        return Load(
            sum(load.requests for load in loads),
            sum(load.prefilling for load in loads),
            sum(load.held for load in loads),
        )

    async def count_ranks(self) -> int:
        """Return how many data-parallel ranks the replica has, once it is ready; 1 if it does not say."""
        while True:
            await self.ready.wait()
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    status, body = await self.client.get(b"/server_info", self._headers)
                return (_info.decode(body).runtime.data_parallel_size or 1) if status == 200 else 1
            except (msgspec.MsgspecError, AnswerTooLong):
                return 1
            except (TimeoutError, ConnectionFailed):
                await asyncio.sleep(self.probe_seconds)
