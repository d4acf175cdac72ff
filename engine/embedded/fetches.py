"""Readings of KV blocks that are under way, how they end, and those that were given up and may still write."""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.embedded.kv.groups import Table
from engine.embedded.kv.source import Reading
from engine.embedded.scheduler import Fetch, Scheduler
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.embedded.step import Chunk
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
    copied_since: float
    """When it began to copy, after it last waited."""


class _Unconfirmed(NamedTuple):
    """A reading whose sequence runs, although its blocks may prove not to be what was offered."""

    entry: _ActiveFetch
    admission: int
    """The sequence's when it began to run."""

    @property
    def sequence(self) -> Sequence:
        return self.entry.fetch.sequence

    @property
    def counts(self) -> bool:
        """Whether the sequence still has the blocks."""
        return self.sequence.admission == self.admission and self.sequence.status is SequenceStatus.RUNNING


class _Orphan(NamedTuple):
    """A reading that was given up, and the blocks that it may write to until it is over."""

    reading: Reading
    tables: list[Table]


class Fetches:
    """Reads what the scheduler's sequences fetch. Owned by the engine's thread, like the scheduler; only `land` and
    `confirm` wait, for copies that a device follows."""

    def __init__(self, scheduler: Scheduler, timeout_seconds: float) -> None:
        self._scheduler = scheduler
        self._timeout_seconds = timeout_seconds
        self._running: list[_ActiveFetch] = []
        self.lost: list[tuple[Sequence, str]] = []
        """Sequences whose KV blocks could not be read before the first token was known, and the reasons."""
        self._unconfirmed: list[_Unconfirmed] = []
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
        return _ORPHANS_PAUSE if self._orphans or self._unconfirmed else None

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
                self._running.append(_ActiveFetch(fetch, reading, reading.waits, started))

    def poll(self) -> bool:
        """Take note of readings that have ended, and have others read on; return whether one has ended."""
        running, orphans = self._running, self._orphans
        self._running = [entry for entry in running if not self._ended(entry)]
        self._orphans = [orphan for orphan in self._orphans if not self._over(orphan.reading, orphan.tables)]
        for one in list(self._unconfirmed):
            if not (one.counts or one.sequence.pending) and self._over(one.entry.reading):
                self._unconfirmed.remove(one)
                self._confirm(one)
        return len(self._running) < len(running) or len(self._orphans) < len(orphans)

    def land(self) -> None:
        """Wait until nothing is written any more to the blocks of sequences that run: some may have been given back."""
        for one in self._unconfirmed:
            with suppress(TransferError):  # which `confirm` tells
                one.entry.reading.confirmed(wait=True)

    def confirm(self, chunks: list[Chunk] | None = None) -> list[Sequence]:
        """Confirm the blocks of the sequences of a step, before its tokens are used, or of all sequences. Return those
        whose blocks are not what was offered; they are queued again, if they still run. Waits for the last copies,
        behind which the device runs the step."""
        if not self._unconfirmed:
            return []
        sequences = None if chunks is None else {chunk.sequence for chunk in chunks}
        asked = [one for one in self._unconfirmed if sequences is None or one.sequence in sequences]
        self._unconfirmed = [one for one in self._unconfirmed if one not in asked]
        return [one.sequence for one in asked if not self._confirm(one)]

    def _confirm(self, one: _Unconfirmed) -> bool:
        try:
            one.entry.reading.confirmed(wait=True)
        except TransferError as error:
            one.sequence.void = one.admission
            self._note_failure(one.entry.fetch, str(error))
            if one.counts:
                self._scheduler.refute(one.sequence)
            return False
        self._note_success(one.entry)
        if one.counts:
            self._scheduler.confirm(one.sequence)
        return True

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
        try:
            done = entry.reading.done()
            confirmed = done and entry.reading.confirmed()
        except TransferError as error:
            self._scheduler.release_orphan(self._give_up(entry.fetch, str(error)))
            return True
        entry.waits = entry.reading.waits
        if done:
            self._scheduler.fetched(entry.fetch)
            if confirmed:
                self._scheduler.confirm(entry.fetch.sequence)
                self._note_success(entry)
            else:
                self._unconfirmed.append(_Unconfirmed(entry, entry.fetch.sequence.admission))
            return True
        elapsed = now - entry.copied_since
        if not entry.waits and elapsed > self._timeout_seconds:
            self._cancel(entry.reading, self._give_up(entry.fetch, f"not done after {elapsed:.1f} s"))
            return True
        return False

    def _note_success(self, entry: _ActiveFetch) -> None:
        if entry.fetch.source.is_transfer:
            self._succeeded += 1
            self._bytes += entry.reading.num_bytes
            self._seconds += entry.reading.seconds

    def _note_failure(self, fetch: Fetch, reason: str) -> None:
        if fetch.sequence.status is not SequenceStatus.FINISHED:
            log.warning(
                "could not read the KV blocks of request %s%s: %s",
                fetch.sequence.request.request_id,
                "" if fetch.sequence.lacks_first else "; computing its prompt here",
                reason,
            )
        self._failed += fetch.source.is_transfer

    def _give_up(self, fetch: Fetch, reason: str) -> list[Table]:
        """Queue a sequence again, as after a preemption, or note that it is lost; return the blocks that it leaves."""
        sequence = fetch.sequence
        self._note_failure(fetch, reason)
        if sequence.lacks_first:
            self.lost.append((sequence, reason))
        return self._scheduler.abandon(sequence, again=not sequence.lacks_first)

    def _cancel(self, reading: Reading, tables: list[Table]) -> None:
        reading.cancel()
        self._orphans.append(_Orphan(reading, tables))

    def _over(self, reading: Reading, orphan: list[Table] | None = None) -> bool:
        """Return whether a reading that nothing needs writes no more, having released the blocks that it leaves."""
        try:
            if not (reading.done() and reading.confirmed()):
                return False
        except TransferError:
            pass  # as a rule because it was cancelled
        if orphan is not None:
            self._scheduler.release_orphan(orphan)
        return True
