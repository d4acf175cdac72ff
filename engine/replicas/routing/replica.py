"""One replica as the router sees it: whether it can be asked, how busy it is, and what its events say."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.replicas.routing.events import Cleared, Event
from engine.replicas.routing.index import PrefixIndex
from engine.replicas.routing.load import Load
from engine.replicas.routing.upstream import Header, Upstream, UpstreamError

PROBE_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""How long a probe may take; after twice as long without an answer all requests there are given up."""
LONGEST_PAUSE = 30.0
"""Of the breaker."""

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Who counts what the router does. Replicas are numbers."""

    def answered(self, replica: int, outcome: str) -> None:
        """An attempt has ended: ok, error, refused, unreachable, lost (in the middle of its answer) or cancelled."""

    def chosen(self, replica: int, prompt: int, overlap: int, seconds: float) -> None:
        """A request goes there; of the `prompt` tokens known of it `overlap` are in the replica's cache."""

    def tokenised(self, seconds: float) -> None: ...

    def retried(self) -> None: ...

    def affine(self) -> None:
        """A session's request goes where the session is."""

    def state(self, replica: int, available: bool, blocks: int, load: Load) -> None: ...

    def gap(self, replica: int, missed: int) -> None: ...

    def replayed(self, replica: int, messages: int) -> None: ...

    def malformed(self, replica: int) -> None: ...

    def unattached(self, replica: int, blocks: int) -> None: ...

    def gone(self, replica: int) -> None: ...


class Learner:
    """The `Sink` of the events of one data-parallel rank of a replica."""

    def __init__(self, number: int, rank: int, index: PrefixIndex, observer: Observer) -> None:
        self._number, self._rank, self._index, self._observer = number, rank, index, observer

    def apply(self, event: Event) -> None:
        if unattached := self._index.apply(self._number, event):
            self._observer.unattached(self._number, unattached)

    def restarted(self) -> None:
        self._index.apply(self._number, Cleared(self._rank))

    def gap(self, missed: int) -> None:
        self._observer.gap(self._number, missed)

    def replayed(self, messages: int) -> None:
        self._observer.replayed(self._number, messages)

    def malformed(self) -> None:
        self._observer.malformed(self._number)


class _Runtime(msgspec.Struct):
    data_parallel_size: int | None = 1
    """None before the engine is there."""


class _Info(msgspec.Struct):
    """What a replica says of itself at /server_info, as far as it matters here."""

    runtime: _Runtime


_info = msgspec.json.Decoder(_Info)


class Replica:
    """The replica `number` at `url`. `watch` runs for as long as it is one; only then can it be `available`."""

    def __init__(
        self, number: int, url: str, index: PrefixIndex, observer: Observer, headers: Sequence[Header]
    ) -> None:
        """`headers` go with the probes."""
        self.number, self.url = number, url
        self.upstream = Upstream(url)
        self.load = Load()
        self.last_asked = 0
        self.available = False
        self.probed = asyncio.Event()
        self._index, self._observer = index, observer
        self._headers = headers
        self._ready = asyncio.Event()
        self._again = asyncio.Event()
        self._failures = 0
        """Requests that failed one after the other."""
        self._closed_from = 0.0
        self._heard = time.monotonic()
        self._leaving = False

    async def watch(self) -> None:
        """Probe again and again, until cancelled or, if it is left, until its last request has ended. Then its connections are closed."""
        try:
            while not self._leaving or self.load.requests:
                await self._probe()
                self.probed.set()
                if not self._leaving:
                    self._observer.state(self.number, self.available, self._index.blocks(self.number), self.load)
                await self._pause()
        finally:
            self.available = False
            self.upstream.cut("the router closes")

    async def _pause(self) -> None:
        self._again.clear()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._again.wait()
            await asyncio.sleep(PROBE_SECONDS / 10)  # a replica that refuses is not asked in a rush
        except TimeoutError:
            return

    def succeeded(self) -> None:
        """It has begun to answer a request."""
        self._failures = 0

    def refused(self) -> None:
        """It did not take a request at present: it may be full, or shutting down, which a probe tells."""
        self._again.set()

    def failed(self, reason: str) -> None:
        """A request came to nothing. Nobody asks for a while, longer after each failure, and then a probe decides. What fails meanwhile
        had been sent before: a replica that dies with a hundred requests has failed once.
        """
        if time.monotonic() < self._closed_from:
            return
        pause = min(PROBE_SECONDS / 2 * 2**self._failures, LONGEST_PAUSE)
        self._failures = min(self._failures + 1, 8)
        self._closed_from = time.monotonic() + pause
        self._set(False, reason)
        self._again.set()

    def broke_off(self) -> None:
        """An answer was not finished: is it still there?"""
        self._again.set()

    def leave(self) -> None:
        """It is one no more: nothing new goes there, and what it is at may end."""
        self.available, self._leaving = False, True

    async def ranks(self) -> int:
        """How many data-parallel ranks it has, once it is ready; 1 if it does not say."""
        while True:
            await self._ready.wait()
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    status, body = await self._get(b"/server_info")
                return (_info.decode(body).runtime.data_parallel_size or 1) if status == 200 else 1
            except msgspec.MsgspecError:
                return 1
            except (TimeoutError, UpstreamError):
                await asyncio.sleep(PROBE_SECONDS)

    async def _get(self, path: bytes) -> tuple[int, bytes]:
        """Status and body. Raises UpstreamError."""
        connection = await self.upstream.request(self.upstream.head("GET", path, self._headers, 0))
        body = b""
        try:
            while chunk := await connection.chunk():
                body += chunk
        finally:
            self.upstream.release(connection)
        return connection.status, body

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                status, _ = await self._get(b"/health/ready")
        except (TimeoutError, UpstreamError) as error:
            self._set(False, str(error) or f"it has been silent for {SILENCE_SECONDS:g} s")
            if (
                time.monotonic() - self._heard >= 2 * SILENCE_SECONDS
            ):  # a host that is gone does not end its connections
                self.upstream.cut("the replica has been silent for too long")
            return
        self._heard = time.monotonic()
        ready = status == 200
        if ready and time.monotonic() < self._closed_from:
            return
        self._set(ready, "" if ready else f"it says {status} of its readiness")

    def _set(self, available: bool, reason: str) -> None:
        if self._leaving:
            return
        if available != self.available:
            log.log(
                logging.INFO if available else logging.WARNING,
                "replica %d at %s: %s",
                self.number,
                self.url,
                reason or "ready",
            )
        self.available = available
        if available:
            self._ready.set()
