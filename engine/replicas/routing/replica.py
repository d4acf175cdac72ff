"""One replica behind a router: whether it is ready, how busy it is, and what its KV-cache events say."""

import asyncio
import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from engine.errors import EngineNotReady
from engine.replicas.client import AnswerTooLong, ConnectionFailed, Header
from engine.replicas.pool import PoolObserver
from engine.replicas.replica import Replica
from engine.replicas.routing.events import CacheEvent, ClearedEvent
from engine.replicas.routing.index import PrefixIndex
from engine.replicas.routing.load import Load

SILENCE_SECONDS = 5.0
"""How long a probe may take; after twice as long without an answer all requests there are given up."""


class RoutingObserver(PoolObserver, Protocol):
    """Counts what the router does. Replicas are numbers."""

    def answered(self, replica: int, outcome: str) -> None:
        """An attempt has ended: ok, error, refused, unreachable, lost (in the middle of its answer) or cancelled."""

    def chosen(self, replica: int, prompt: int, overlap: int, seconds: float) -> None:
        """A request goes there; of the `prompt` tokens known of it `overlap` are in the replica's cache."""

    def tokenised(self, seconds: float) -> None:
        """A prompt was rendered and tokenised."""

    def affine(self) -> None:
        """A request goes where its session is."""

    def state(self, replica: int, available: bool, blocks: int, load: Load) -> None:
        """The state of a replica now."""

    def gap(self, replica: int, missed: int) -> None:
        """Messages of events were missed."""

    def replayed(self, replica: int, messages: int) -> None:
        """Messages of events came when asked for again."""

    def malformed(self, replica: int) -> None:
        """A message of events made no sense."""

    def unattached(self, replica: int, blocks: int) -> None:
        """Blocks were left out because their parent is not known."""

    def gone(self, replica: int) -> None:
        """A replica has left; its number may be given to another one."""


class Learner:
    """Applies the events of one data-parallel rank of a replica to the index: the `EventHandler` of a subscriber."""

    def __init__(self, number: int, rank: int, index: PrefixIndex, observer: RoutingObserver) -> None:
        self._number = number
        self._rank = rank
        self._index = index
        self._observer = observer

    def apply(self, event: CacheEvent) -> None:
        if unattached := self._index.apply(self._number, event):
            self._observer.unattached(self._number, unattached)

    def restarted(self) -> None:
        self._index.apply(self._number, ClearedEvent(self._rank))

    def gap(self, missed: int) -> None:
        self._observer.gap(self._number, missed)

    def replayed(self, messages: int) -> None:
        self._observer.replayed(self._number, messages)

    def malformed(self) -> None:
        self._observer.malformed(self._number)


class _RuntimeInfo(msgspec.Struct):
    data_parallel_size: int | None = 1
    """None before the engine has started."""


class _ServerInfo(msgspec.Struct):
    """The part of a replica's /server_info that the router reads."""

    runtime: _RuntimeInfo


_info = msgspec.json.Decoder(_ServerInfo)


class RoutedReplica(Replica):
    """The replica `number` at `url`. `headers` go with its probes."""

    probe_seconds: ClassVar[float] = 1.0

    def __init__(
        self, number: int, url: str, index: PrefixIndex, observer: RoutingObserver, headers: Sequence[Header]
    ) -> None:
        super().__init__(url, f"replica {number} at {url}")
        self.number = number
        self.load = Load()
        self._index = index
        self._observer = observer
        self._headers = headers
        self._heard = time.monotonic()
        """When it last answered a probe."""

    async def probe(self) -> None:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                status, _ = await self.client.get(b"/health/ready", self._headers)
        except (TimeoutError, ConnectionFailed) as error:
            if time.monotonic() - self._heard >= 2 * SILENCE_SECONDS:  # a lost host does not end its connections
                self.client.cut("the replica has been silent for too long")
            raise ConnectionFailed(str(error) or f"it has been silent for {SILENCE_SECONDS:g} s") from error
        self._heard = time.monotonic()
        if status != 200:
            raise EngineNotReady(f"its readiness is {status}")

    def report(self) -> None:
        self._observer.state(self.number, self.available, self._index.blocks(self.number), self.load)

    def leave(self) -> None:
        if not self.left:
            self._observer.gone(self.number)
        super().leave()

    async def ranks(self) -> int:
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
