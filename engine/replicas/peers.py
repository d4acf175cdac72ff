"""One replica as seen from another that has it prefill or encode: whether it can be asked, how busy it is, and which prefixes it has."""

import asyncio
import logging
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import httpx
import msgspec

from engine.errors import EngineDied, EngineError, EngineFailure, EngineNotReady, InvalidRequest
from engine.kit.spans import overlaps_of
from engine.media import MediaSpan
from engine.replicas import ask as client
from engine.replicas.ask import PREFILL, Lease, PeerError, Service
from engine.types import Handoff
from protocol.internal import PrefillInfo

PROBE_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
MAX_KEYS = 1 << 16
"""Blocks remembered for one peer."""

I = TypeVar("I", bound=msgspec.Struct)  # noqa: E741
T = TypeVar("T")

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Who counts what happens between the replicas."""

    def answered(self, peer: str, outcome: str, seconds: float) -> None:
        """A peer has handed over (`ok`), or has not: invalid, unavailable, failed, unreachable, silent, refused or cancelled."""

    def retried(self) -> None:
        """A request goes to another peer."""

    def computed_locally(self, reason: str) -> None:
        """It is done here: because a prompt is short, for want of a peer (`no_peer`), or after its KV blocks were lost (`lost`)."""

    def available(self, peer: str, available: bool) -> None:
        """Whether a peer takes requests."""

    def gone(self, peer: str) -> None:
        """It is no peer any more, and nothing more is said of it."""


class Breaker:
    """Closed while all is well. A failure opens it: nobody asks, until after a pause, longer after each failure, one probe decides."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    @property
    def closed(self) -> bool:
        return self._failures == 0

    @property
    def pause(self) -> float:
        """Seconds until the probe; 0 if it is due, or if the breaker is closed."""
        return max(self._until - self._clock(), 0.0) if self._failures else 0.0

    def succeed(self) -> None:
        self._failures = 0

    def fail(self) -> None:
        """Requests that fail together, while it is open already, count once."""
        if self.pause:
            return
        pause = min(FIRST_PAUSE * 2**self._failures, LONGEST_PAUSE)
        self._failures = min(self._failures + 1, 16)
        self._until = self._clock() + pause * random.uniform(0.8, 1.2)


class Prefixes:
    """Keys of the blocks that a peer has computed, the least recently used forgotten first. A guess: it may have evicted them since."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[int, None] = OrderedDict()

    def known(self, keys: Sequence[int]) -> int:
        """How many blocks from the start are known."""
        return next((count for count, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the start of a prefix is of use for longest
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()


def block_keys(tokens: Sequence[int], block_size: int, salt: str, images: Sequence[MediaSpan] = ()) -> list[int]:
    """A key for each whole block but one that ends the prompt, whose last token is always computed. It stands for all tokens and images so
    far.
    """
    data = array("I", tokens)
    keys, key = [], hash(salt)
    for end in range(block_size, len(data), block_size):
        start = end - block_size
        key = hash((key, data[start:end].tobytes(), *overlaps_of(images, start, block_size)))
        keys.append(key)
    return keys


class Peer(Generic[I, T]):
    """A replica at `url` that does `service`. `watch` runs for as long as it is one; only then can it be `available`."""

    def __init__(self, url: str, service: Service[I, T], http: httpx.AsyncClient, observer: Observer) -> None:
        self.url = url
        self.in_flight = 0
        """Work that it was asked to do and has not answered for: prompt tokens, or images."""
        self.last_asked = 0
        self.info: I | None = None
        self.reason = "one has not answered yet"
        """Why it is not available, if it is not."""
        self.probed = asyncio.Event()
        self._service = service
        self._http = http
        self._observer = observer
        self._breaker = Breaker()
        self._gone = False

    @property
    def available(self) -> bool:
        return self.info is not None and self._breaker.closed

    async def watch(self) -> None:
        """Probe again and again, until cancelled."""
        try:
            while True:
                if not self._breaker.pause:
                    await self._probe()
                    self.probed.set()
                await asyncio.sleep(self._breaker.pause or PROBE_SECONDS)
        finally:
            self._gone = True
            self._observer.gone(self.url)

    async def ask(self, body: Sequence[bytes], request_id: str, work: int) -> Lease[T]:
        """Raises as `client.ask` does. `work`: how much of it there is."""
        started, outcome = time.perf_counter(), "cancelled"
        self.in_flight += work
        try:
            lease = await client.ask(self._http, self._service, self.url, body, {"x-request-id": request_id})
            outcome = "ok"
            return lease
        except EngineError as error:
            outcome = _outcome(error)
            if isinstance(error, PeerError | EngineNotReady | EngineDied):
                self._fail(error)
            raise
        finally:
            self.in_flight -= work
            if not self._gone:
                self._observer.answered(self.url, outcome, time.perf_counter() - started)

    def forget(self) -> None:
        """It may be another one when it is back."""

    async def _probe(self) -> None:
        try:
            info = await client.describe(self._http, self._service, self.url)
        except EngineError as error:
            self._fail(error)
            return
        except Exception as error:  # whatever a peer has come up with: probes go on
            log.exception("the probe of %s replica %s failed", self._service.name, self.url)
            self._fail(PeerError(f"a probe has failed: {type(error).__name__}", "refused"))
            return
        if not self.available:
            log.info("%s replica %s answers", self._service.name, self.url)
            self._observer.available(self.url, True)
        self.info = info
        self._breaker.succeed()

    def _fail(self, error: EngineError) -> None:
        if self.available or str(error) != self.reason:
            log.warning("%s replica %s: %s", self._service.name, self.url, in_full(error))
        self.reason = str(error)
        self.forget()
        self._breaker.fail()
        if not self._gone:
            self._observer.available(self.url, False)


class PrefillPeer(Peer[PrefillInfo, Handoff]):
    """A prefill replica, and the prefixes that it has computed."""

    def __init__(self, url: str, http: httpx.AsyncClient, observer: Observer) -> None:
        super().__init__(url, PREFILL, http, observer)
        self.prefixes = Prefixes()

    def cost(self, keys: Sequence[int], tokens: int, block_size: int) -> int:
        """Prompt tokens to compute before the first token of such a request."""
        return self.in_flight + tokens - self.prefixes.known(keys) * block_size

    async def prefill(self, body: Sequence[bytes], request_id: str, keys: Sequence[int], tokens: int) -> Lease[Handoff]:
        """Raises as `client.ask` does. `tokens`: how many are to be computed."""
        lease = await self.ask(body, request_id, tokens)
        self.prefixes.add(keys)
        return lease

    def forget(self) -> None:
        self.prefixes.clear()


def in_full(error: EngineError) -> str:
    """With what a library said, for the log."""
    return f"{error} ({error.__cause__!r})" if error.__cause__ is not None else str(error)


def _outcome(error: EngineError) -> str:
    if isinstance(error, PeerError):
        return error.outcome
    if isinstance(error, InvalidRequest):
        return "invalid"
    return "failed" if isinstance(error, EngineFailure) else "unavailable"
