"""Storage of batches of messages: one file for all processes that serve a model on this machine."""

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import QueueFull
from multimodal.errors import RequestError, shown
from routers.database import Database
from routers.errors import NotFound

Outcome = Literal["succeeded", "errored", "canceled", "expired"]
OUTCOMES: tuple[Outcome, ...] = ("succeeded", "errored", "canceled", "expired")
EXPIRY_SECONDS = 24 * 3600.0
"""Time for a batch; requests that have not been answered by then expire."""
KEEP_SECONDS = 29 * 24 * 3600.0
"""Time after which a batch is removed."""
PAGE = 100
"""Results that are read at once."""
_OVERHEAD = 256
"""Bytes that a row counts in addition to its contents."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, created REAL NOT NULL,
    canceled REAL, ended REAL, total INTEGER NOT NULL, size INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (
    batch INTEGER NOT NULL REFERENCES batches (number), place INTEGER NOT NULL, custom_id TEXT NOT NULL,
    state TEXT NOT NULL, params BLOB, result BLOB, PRIMARY KEY (batch, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_state ON requests (state, batch, place);
PRAGMA user_version = 1;
"""
_COLUMNS = "number, id, created, canceled, ended, total"


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch. Times are Unix times."""

    number: int
    """Batches of all keys are numbered as they come."""
    id: str
    created: float
    canceled: float | None
    """Time of the request to cancel it."""
    ended: float | None
    total: int
    """Number of its requests."""
    counts: dict[str, int]
    """Number of requests by outcome; empty until the batch has ended."""


class BatchJob(msgspec.Struct, frozen=True):
    """A request of a batch that is to be done."""

    batch: int
    place: int
    params: bytes


class BatchStore:
    """Batches of all owners, of at most `max_bytes`, each of at most `max_requests`. Methods for clients see only what
    `owner` owns.
    """

    def __init__(self, path: Path, max_bytes: int, max_requests: int) -> None:
        self.max_requests = max_requests
        self.news = asyncio.Event()
        """Set when this process has stored a batch."""
        self._max_bytes = max_bytes
        self._database = Database(path, _SCHEMA, "batches")
        self._turns: dict[str, int] = {}
        """Number of the last turn of each owner; there are as many as API keys."""

    @property
    def path(self) -> Path:
        return self._database.path

    async def create(self, owner: str, batch: str, requests: Sequence[tuple[str, bytes]]) -> BatchRecord:
        """Store a batch of custom ids and bodies. Raises QueueFull if there is no room."""
        size = sum(len(name) + len(params) + _OVERHEAD for name, params in requests)

        def work(db: sqlite3.Connection) -> BatchRecord:
            _delete(db, "created<=?", time.time() - KEEP_SECONDS)
            if _total(db) + size > self._max_bytes:
                raise QueueFull("The batches that are stored leave no room for another; delete some that have ended.")
            query = "INSERT INTO batches (id, owner, created, total, size) VALUES (?, ?, ?, ?, ?)"
            number = db.execute(query, (batch, owner, time.time(), len(requests), size)).lastrowid
            rows = ((number, place, name, params) for place, (name, params) in enumerate(requests))
            db.executemany("INSERT INTO requests VALUES (?, ?, ?, 'waiting', ?, NULL)", rows)
            return _record(db, owner, batch)

        record = await self._database.run(work)
        self.news.set()
        return record

    async def get(self, owner: str, batch: str) -> BatchRecord:
        """Return a batch. Raises NotFound."""
        return await self._database.run(lambda db: _record(db, owner, batch))

    async def page(
        self, owner: str, limit: int, after: str | None, before: str | None
    ) -> tuple[list[BatchRecord], bool]:
        """Return batches, the newest first, and whether there are more in that direction: those after or before one, if
        it is named. Raises NotFound.
        """

        def work(db: sqlite3.Connection) -> tuple[list[BatchRecord], bool]:
            named = after or before
            number = _record(db, owner, named).number if named else 1 << 62
            sign, order = (">", "ASC") if before and not after else ("<", "DESC")
            query = f"SELECT id FROM batches WHERE owner=? AND number{sign}? ORDER BY number {order} LIMIT ?"
            found = [row[0] for row in db.execute(query, (owner, number, limit + 1))]
            records = [_record(db, owner, batch) for batch in found[:limit]]
            return sorted(records, key=lambda record: -record.number), len(found) > limit

        return await self._database.run(work)

    async def cancel(self, owner: str, batch: str) -> BatchRecord:
        """Cancel the requests that have not begun. Raises NotFound."""

        def work(db: sqlite3.Connection) -> BatchRecord:
            record = _record(db, owner, batch)
            if record.ended is None and record.canceled is None:
                db.execute("UPDATE batches SET canceled=? WHERE number=?", (time.time(), record.number))
                query = "UPDATE requests SET state='canceled', params=NULL WHERE batch=? AND state='waiting'"
                db.execute(query, (record.number,))
                _end(db, record.number)
            return _record(db, owner, batch)

        return await self._database.run(work)

    async def delete(self, owner: str, batch: str) -> None:
        """Delete a batch. Raises NotFound, and RequestError for a batch that has not ended."""

        def work(db: sqlite3.Connection) -> None:
            record = _record(db, owner, batch)
            if record.ended is None:
                raise RequestError("The batch has not ended; cancel it first.", "message_batch_id")
            _delete(db, "number=?", record.number)

        await self._database.run(work)

    async def results(self, batch: BatchRecord, first: int) -> list[tuple[str, str, bytes]]:
        """Return custom ids, outcomes and results of the next requests from a place on; empty at the end."""

        def work(db: sqlite3.Connection) -> list[tuple[str, str, bytes]]:
            query = "SELECT custom_id, state, result FROM requests WHERE batch=? AND place>=? ORDER BY place LIMIT ?"
            return [
                (name, state, result or b"") for name, state, result in db.execute(query, (batch.number, first, PAGE))
            ]

        return await self._database.run(work)

    async def resume(self) -> None:
        """Queue requests again that a process was working on when it ended."""
        await self._database.run(lambda db: db.execute("UPDATE requests SET state='waiting' WHERE state='running'"))

    async def take(self) -> BatchJob | None:
        """Return the next waiting request and mark it as running; None if none waits.

        Owners take turns: the next has the fewest running requests, and among these has waited the longest for its
        turn. Batches of an owner follow one another.
        """

        def work(db: sqlite3.Connection) -> BatchJob | None:
            late = "SELECT number FROM batches WHERE ended IS NULL AND created<=?"
            for (number,) in db.execute(late, (time.time() - EXPIRY_SECONDS,)).fetchall():
                query = "UPDATE requests SET state='expired', params=NULL WHERE batch=? AND state='waiting'"
                db.execute(query, (number,))
                _end(db, number)
            query = (
                "SELECT owner, min(number) FROM batches WHERE ended IS NULL AND EXISTS"
                " (SELECT 1 FROM requests WHERE state='waiting' AND batch=number) GROUP BY owner"
            )
            first: dict[str, int] = dict(db.execute(query).fetchall())
            if not first:
                return None
            query = (
                "SELECT owner, count(*) FROM requests JOIN batches ON number=batch WHERE state='running' GROUP BY owner"
            )
            running: dict[str, int] = dict(db.execute(query).fetchall())
            owner = min(first, key=lambda owner: (running.get(owner, 0), self._turns.get(owner, 0), first[owner]))
            self._turns[owner] = max(self._turns.values(), default=0) + 1
            query = "SELECT batch, place, params FROM requests WHERE state='waiting' AND batch=? ORDER BY place LIMIT 1"
            row = db.execute(query, (first[owner],)).fetchone()
            db.execute("UPDATE requests SET state='running' WHERE batch=? AND place=?", row[:2])
            return BatchJob(*row)

        return await self._database.run(work)

    async def put_back(self, job: BatchJob) -> None:
        """Queue a request again, unless its batch is cancelled."""

        def work(db: sqlite3.Connection) -> None:
            (canceled,) = db.execute("SELECT canceled FROM batches WHERE number=?", (job.batch,)).fetchone()
            state = "waiting" if canceled is None else "canceled"
            db.execute("UPDATE requests SET state=? WHERE batch=? AND place=?", (state, job.batch, job.place))
            _end(db, job.batch)

        await self._database.run(work)

    async def finish(self, job: BatchJob, outcome: Outcome, result: bytes) -> bool:
        """Store the outcome of a request. Return False if there is no room even without the oldest ended batches. There
        is always room for an error, which is short; otherwise the request would be repeated.
        """

        def work(db: sqlite3.Connection) -> bool:
            excess = _total(db) + len(result) - len(job.params) - self._max_bytes
            oldest = "SELECT number, size FROM batches WHERE ended IS NOT NULL ORDER BY number"
            for number, size in db.execute(oldest).fetchall():
                if excess <= 0:
                    break
                _delete(db, "number=?", number)
                excess -= size
            if excess > 0 and outcome != "errored":
                return False
            query = "UPDATE requests SET state=?, params=NULL, result=? WHERE batch=? AND place=?"
            db.execute(query, (outcome, result, job.batch, job.place))
            growth = len(result) - len(job.params)
            db.execute("UPDATE batches SET size=size+? WHERE number=?", (growth, job.batch))
            _end(db, job.batch)
            return True

        return await self._database.run(work)

    async def close(self) -> None:
        await self._database.close()


def _record(db: sqlite3.Connection, owner: str, batch: str) -> BatchRecord:
    row = db.execute(f"SELECT {_COLUMNS} FROM batches WHERE id=? AND owner=?", (batch, owner)).fetchone()
    if row is None:
        raise NotFound(f"There is no batch '{shown(batch)}'.", "message_batch_id", "batch_not_found")
    number, _, created, canceled, ended, total = row
    query = "SELECT state, count(*) FROM requests WHERE batch=? GROUP BY state"
    counts = dict(db.execute(query, (number,)).fetchall()) if ended is not None else {}
    return BatchRecord(number, batch, created, canceled, ended, total, counts)


def _end(db: sqlite3.Connection, number: int) -> None:
    """Mark a batch as ended if all its requests have an outcome."""
    db.execute(
        "UPDATE batches SET ended=? WHERE number=? AND ended IS NULL AND NOT EXISTS"
        " (SELECT 1 FROM requests WHERE batch=number AND state IN ('waiting', 'running'))",
        (time.time(), number),
    )


def _delete(db: sqlite3.Connection, condition: str, value: float) -> None:
    db.execute(f"DELETE FROM requests WHERE batch IN (SELECT number FROM batches WHERE {condition})", (value,))
    db.execute(f"DELETE FROM batches WHERE {condition}", (value,))


def _total(db: sqlite3.Connection) -> int:
    (total,) = db.execute("SELECT coalesce(sum(size), 0) FROM batches").fetchone()
    return int(total)
