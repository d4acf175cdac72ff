"""Readings of KV blocks that are under way, how they end, and those that were given up and may still write."""

import logging
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.embedded.kv.groups import Table
from engine.embedded.kv.source import Reading
from engine.embedded.scheduler import Fetch, Scheduler
from engine.embedded.sequence import Sequence
from engine.transfer.base import TransferError

_PAUSE = 0.001
_ORPHANS_PAUSE = 0.02

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _ActiveFetch:
    fetch: Fetch
    reading: Reading
    waits: bool
    """Whether nothing was copied after the last poll."""
    polled: float
    copied_since: float
    """When it began to copy, after it last waited."""
    seconds: float = 0.0
    """Time in which something was copied."""


class _Orphan(NamedTuple):
    """A reading that was given up, and the blocks that it may write to until it is over."""

    reading: Reading
    tables: list[Table]


class Fetches:
    """Reads what the scheduler's sequences fetch. Owned by the engine's thread, like the scheduler; nothing here
    waits."""

    def __init__(self, scheduler: Scheduler, timeout_seconds: float) -> None:
        self._scheduler = scheduler
        self._timeout_seconds = timeout_seconds
        self._running: list[_ActiveFetch] = []
        self.lost: list[tuple[Sequence, str]] = []
        """Sequences whose KV blocks could not be read before the first token was known, and the reasons."""
        self._orphans: list[_Orphan] = []
        self._succeeded = 0
        self._failed = 0
        self._bytes = 0
        self._seconds = 0.0

    @property
    def poll_seconds(self) -> float | None:
        """The longest pause between two calls of `poll`; None if there is nothing to poll."""
        if any(not entry.waits for entry in self._running):
            return _PAUSE
        return _ORPHANS_PAUSE if self._orphans else None

    def stats(self) -> dict[str, Any]:
        """Return the fields of `IterationStats` on transfers."""
        return {
            "kv_transfer_success_total": self._succeeded,
            "kv_transfer_failure_total": self._failed,
            "kv_transfer_bytes": self._bytes,
            "kv_transfer_latency_seconds": self._seconds,
        }

    def start(self, fetches: list[Fetch]) -> None:
        """Begin to read for sequences that the scheduler has given blocks."""
        for fetch in fetches:
            started = time.monotonic()
            try:
                reading = fetch.source.read(fetch.sequence, fetch.missing)
            except TransferError as error:
                self._scheduler.release_orphan(self._give_up(fetch, str(error)))
            else:
                self._running.append(_ActiveFetch(fetch, reading, reading.waits, started, started))

    def poll(self) -> bool:
        """Take note of readings that have ended, and have others read on; return whether one has ended."""
        running, orphans = self._running, self._orphans
        self._running = [entry for entry in running if not self._ended(entry)]
        self._orphans = [orphan for orphan in self._orphans if not self._over(orphan)]
        return len(self._running) < len(running) or len(self._orphans) < len(orphans)

    def abort(self, sequence: Sequence) -> None:
        """Give up a FETCHING sequence."""
        tables = self._scheduler.abandon(sequence, again=False)
        entry = next((entry for entry in self._running if entry.fetch.sequence is sequence), None)
        if entry is None:
            self._scheduler.release_orphan(tables)  # its reading has not begun
            return
        self._running.remove(entry)
        self._cancel(entry.reading, tables)

    def _ended(self, entry: _ActiveFetch) -> bool:
        """Return whether a reading has succeeded, failed or taken too long, having done what follows from that."""
        now = time.monotonic()
        if entry.waits:
            entry.copied_since = now
        else:
            entry.seconds += now - entry.polled
        try:
            done = entry.reading.done()
        except TransferError as error:
            self._scheduler.release_orphan(self._give_up(entry.fetch, str(error)))
            return True
        entry.waits, entry.polled = entry.reading.waits, now
        if done:
            self._scheduler.fetched(entry.fetch)
            if entry.fetch.source.is_transfer:
                self._succeeded += 1
                self._bytes += entry.reading.num_bytes
                self._seconds += entry.seconds
            return True
        elapsed = now - entry.copied_since
        if not entry.waits and elapsed > self._timeout_seconds:
            self._cancel(entry.reading, self._give_up(entry.fetch, f"not done after {elapsed:.1f} s"))
            return True
        return False

    def _give_up(self, fetch: Fetch, reason: str) -> list[Table]:
        """Queue a sequence again, as after a preemption, or note that it is lost; return the blocks that it leaves."""
        sequence = fetch.sequence
        log.warning(
            "could not read the KV blocks of request %s%s: %s",
            sequence.request.request_id,
            "" if sequence.lacks_first else "; computing its prompt here",
            reason,
        )
        self._failed += fetch.source.is_transfer
        if sequence.lacks_first:
            self.lost.append((sequence, reason))
        return self._scheduler.abandon(sequence, again=not sequence.lacks_first)

    def _cancel(self, reading: Reading, tables: list[Table]) -> None:
        reading.cancel()
        self._orphans.append(_Orphan(reading, tables))

    def _over(self, orphan: _Orphan) -> bool:
        try:
            if not orphan.reading.done():
                return False
        except TransferError:
            pass  # as a rule because it was cancelled; nothing needs its bytes
        self._scheduler.release_orphan(orphan.tables)
        return True
