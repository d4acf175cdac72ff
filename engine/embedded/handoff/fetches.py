"""Reading other replicas' KV blocks: the transfers under way, their end, good or bad, and those that may still write after it."""

import logging
import time
from collections.abc import Sequence as Sequence_
from typing import Any, NamedTuple

from engine.embedded.handoff.leases import Lease, Leases
from engine.embedded.handoff.state import reads_of
from engine.embedded.kv.groups import Table
from engine.embedded.scheduler import Fetch, Scheduler
from engine.embedded.sequence import Sequence
from engine.transfer.base import Read, Transfer, TransferError
from engine.transfer.transfers import Transfers

_PAUSE, _ORPHANS_PAUSE = 0.001, 0.02

log = logging.getLogger(__name__)


class _Reading(NamedTuple):
    sequence: Sequence
    transfer: Transfer
    size: int
    lease: Lease
    word: Read
    """What has read the lease's word, after all else."""
    started: float


class _Orphan(NamedTuple):
    """A transfer that nobody waits for, and the blocks that it may write to until it is over."""

    transfer: Transfer
    tables: list[Table]


class Fetches:
    """Owned by the engine's thread, like the scheduler. Nothing here waits but `close`; times are in seconds."""

    def __init__(self, scheduler: Scheduler, transfers: Transfers, leases: Leases, timeout: float) -> None:
        self._scheduler, self._transfers, self._leases, self._timeout = scheduler, transfers, leases, timeout
        self._readings: list[_Reading] = []
        self._orphans: list[_Orphan] = []
        self._succeeded = self._failed = self._bytes = 0
        self._seconds = 0.0

    @property
    def poll_seconds(self) -> float | None:
        """The longest pause between two calls of `poll`; None if there is nothing to poll."""
        return _PAUSE if self._readings else _ORPHANS_PAUSE if self._orphans else None

    def stats(self) -> dict[str, Any]:
        """The fields of `IterationStats` on transfers."""
        return {
            "kv_transfer_success_total": self._succeeded,
            "kv_transfer_failure_total": self._failed,
            "kv_transfer_bytes": self._bytes,
            "kv_transfer_latency_seconds": self._seconds,
        }

    def start(self, fetches: Sequence_[Fetch]) -> None:
        """Begin to read for sequences that the scheduler has given blocks."""
        for sequence, missing in fetches:
            remote = sequence.remote
            assert remote is not None
            reads, started = reads_of(remote, sequence.tables, missing), time.monotonic()
            word = self._leases.read(remote.lease, len(remote.layout.block_bytes))
            try:
                transfer = self._transfers.read(remote.offers, [*reads, word])
            except TransferError as error:
                self._scheduler.release_orphan(self._compute_here(sequence, str(error)))
            else:
                size = sum(read.size for read in reads)
                self._readings.append(_Reading(sequence, transfer, size, remote.lease, word, started))

    def poll(self) -> bool:
        """Take note of what has ended; whether anything has."""
        readings, orphans = self._readings, self._orphans
        self._readings = [reading for reading in readings if not self._ended(reading)]
        self._orphans = [orphan for orphan in self._orphans if not self._over(orphan)]
        return len(self._readings) < len(readings) or len(self._orphans) < len(orphans)

    def abort(self, sequence: Sequence) -> None:
        """A fetching sequence is wanted no more."""
        reading = next(reading for reading in self._readings if reading.sequence is sequence)
        self._readings.remove(reading)
        self._cancel(reading.transfer, self._scheduler.abandon(sequence))

    def close(self) -> None:
        """End all transfers and wait for that: the memory that they write to is about to go."""
        self._transfers.close()

    def _ended(self, reading: _Reading) -> bool:
        """Whether a transfer has succeeded, failed or taken too long, and what follows from that."""
        elapsed = time.monotonic() - reading.started
        try:
            done = reading.transfer.done()
            if done and not self._leases.outlived(reading.lease, reading.word):
                raise TransferError("they were given up before they had been read")
        except TransferError as error:
            self._scheduler.release_orphan(self._compute_here(reading.sequence, str(error)))
            return True
        if done:
            self._scheduler.fetched(reading.sequence)
            self._succeeded += 1
            self._bytes += reading.size
            self._seconds += elapsed
            return True
        if elapsed > self._timeout:
            self._cancel(reading.transfer, self._compute_here(reading.sequence, f"not done after {elapsed:.1f} s"))
            return True
        return False

    def _compute_here(self, sequence: Sequence, reason: str) -> list[Table]:
        """Have a sequence go on as after a preemption; the blocks that it leaves."""
        log.warning(
            "the KV blocks of request %s could not be read; its prompt is computed here: %s",
            sequence.request.request_id,
            reason,
        )
        self._failed += 1
        tables = self._scheduler.abandon(sequence)
        self._scheduler.add(sequence)
        return tables

    def _cancel(self, transfer: Transfer, tables: list[Table]) -> None:
        transfer.cancel()
        self._orphans.append(_Orphan(transfer, tables))

    def _over(self, orphan: _Orphan) -> bool:
        try:
            if not orphan.transfer.done():
                return False
        except TransferError:
            pass  # cancelled, as a rule; nobody needs its bytes
        self._scheduler.release_orphan(orphan.tables)
        return True
