"""Storage of responses: the seam, and SQLite behind it.

One file serves all API processes of this machine, and outlives them. Other databases need the methods of
`ResponseStore`, nothing else.
"""

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engine.errors import ContextOverflow
from routers.database import Database

FINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""Final states of a response."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, beat REAL NOT NULL, size INTEGER NOT NULL,
    status TEXT NOT NULL, background INTEGER NOT NULL, cancelled INTEGER NOT NULL DEFAULT 0,
    previous TEXT, conversation TEXT, response BLOB NOT NULL, items BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_created ON responses (created, size);
CREATE TABLE IF NOT EXISTS events (
    response TEXT NOT NULL, number INTEGER NOT NULL, event BLOB NOT NULL, PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conversations (
    owner TEXT NOT NULL, id TEXT NOT NULL, last TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (owner, id)
) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
_COLUMNS = "id, owner, created, status, background, previous, conversation, response, items, beat, cancelled"


class Record(msgspec.Struct, frozen=True):
    """A stored response. Only `owner` sees it."""

    id: str
    owner: str
    """Digest of the key that made it; empty on a server without keys."""
    created: float
    status: str
    background: bool
    previous: str | None
    """The response that it continues."""
    conversation: str | None
    response: bytes
    """The response object."""
    items: bytes
    """The input items, as a JSON array; each has an id."""
    beat: float = 0.0
    """Time at which the process that runs it was last known to live."""
    cancelled: bool = False
    """Whether a client has asked to cancel it."""

    @property
    def size(self) -> int:
        """Bytes that its contents take."""
        return len(self.response) + len(self.items)


class ResponseStore(Protocol):
    """Storage of responses. All methods see only objects of `owner`."""

    async def put(self, record: Record) -> None:
        """Store a response, or its new state. A background response that was deleted meanwhile stays deleted."""
        ...

    async def get(self, owner: str, response: str) -> Record | None: ...

    async def chain(self, owner: str, response: str, most: int) -> list[Record]:
        """Return a response after those that it continues, oldest first. If one of them is not stored, the list begins
        after it. Raises ContextOverflow if they have more than `most` bytes.
        """
        ...

    async def last(self, owner: str, conversation: str) -> str | None:
        """Return the id of the last response of a conversation."""
        ...

    async def delete(self, owner: str, response: str) -> bool:
        """Return whether there was such a response. A conversation that ended with it ends with the one before."""
        ...

    async def append(self, response: str, first: int, events: Sequence[bytes], ended: Record | None = None) -> bool:
        """Store events of a response that runs in the background, the first with number `first`, and note that its
        process lives. Return whether it goes on: it has been neither cancelled nor deleted. Its final state is stored
        together with its last events, so that a reader who sees these finds it `ended`.
        """
        ...

    async def events(self, response: str, after: int) -> list[bytes]:
        """Return the events that come after one, in order."""
        ...

    async def cancel(self, owner: str, response: str) -> None:
        """Ask the process that runs a response to cancel it."""
        ...

    async def close(self) -> None: ...


class SqliteStore:
    """Responses in an SQLite file, whose calls run in a thread. The oldest are removed when they exceed `max_bytes`,
    and all after `max_seconds`.
    """

    def __init__(self, path: Path, max_bytes: int, max_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._database = Database(path, _SCHEMA, "responses")
        self._unchecked = max_bytes
        """Bytes written since the bounds were last checked; they are checked at the first write."""

    async def put(self, record: Record) -> None:
        await self._database.run(lambda db: self._put(db, record))

    async def get(self, owner: str, response: str) -> Record | None:
        return await self._database.run(lambda db: self._get(db, owner, response))

    async def chain(self, owner: str, response: str, most: int) -> list[Record]:
        def work(db: sqlite3.Connection) -> list[Record]:
            found: list[Record] = []
            left = most
            following: str | None = response
            while following is not None and (record := self._get(db, owner, following)) is not None:
                if (left := left - record.size) < 0:
                    raise ContextOverflow(f"The responses that this one continues have more than {most} bytes.")
                found.append(record)
                following = record.previous
            return found[::-1]

        return await self._database.run(work)

    async def last(self, owner: str, conversation: str) -> str | None:
        def work(db: sqlite3.Connection) -> str | None:
            row = db.execute(
                "SELECT c.last FROM conversations c JOIN responses r ON r.id = c.last"
                " WHERE c.owner=? AND c.id=? AND r.created>?",
                (owner, conversation, self._oldest),
            ).fetchone()
            return None if row is None else str(row[0])

        return await self._database.run(work)

    async def delete(self, owner: str, response: str) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            deleted = db.execute(
                "DELETE FROM responses WHERE id=? AND owner=? RETURNING previous", (response, owner)
            ).fetchall()
            if not deleted:
                return False
            query = "UPDATE conversations SET last=coalesce(?, last) WHERE owner=? AND last=?"
            db.execute(query, (*deleted[0], owner, response))
            db.execute("DELETE FROM events WHERE response=?", (response,))
            return True

        return await self._database.run(work)

    async def append(self, response: str, first: int, events: Sequence[bytes], ended: Record | None = None) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            size = sum(map(len, events))
            lives = db.execute(
                "UPDATE responses SET beat=?, size=size+? WHERE id=? RETURNING cancelled", (time.time(), size, response)
            ).fetchall()
            if not lives:
                return False
            rows = ((response, number, event) for number, event in enumerate(events, first))
            db.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", rows)
            if ended is not None:
                self._put(db, ended)
            self._bound(db, size)
            return not lives[0][0]

        return await self._database.run(work)

    async def events(self, response: str, after: int) -> list[bytes]:
        def work(db: sqlite3.Connection) -> list[bytes]:
            query = "SELECT event FROM events WHERE response=? AND number>? ORDER BY number LIMIT 1000"
            return [row[0] for row in db.execute(query, (response, after))]

        return await self._database.run(work)

    async def cancel(self, owner: str, response: str) -> None:
        def work(db: sqlite3.Connection) -> None:
            db.execute("UPDATE responses SET cancelled=1 WHERE id=? AND owner=?", (response, owner))

        await self._database.run(work)

    async def close(self) -> None:
        await self._database.close()

    @property
    def _oldest(self) -> float:
        return time.time() - self._max_seconds

    def _put(self, db: sqlite3.Connection, record: Record) -> None:
        head = (record.owner, record.created, time.time(), record.size)
        values = (*head, record.status, record.background, record.previous, record.conversation)
        known = db.execute(
            "UPDATE responses SET owner=?, created=?, beat=?, size=size-length(response)-length(items)+?, status=?,"
            " background=?, previous=?, conversation=?, response=?, items=? WHERE id=?",
            (*values, record.response, record.items, record.id),
        ).rowcount
        if not known and not (record.background and record.status != "queued"):
            db.execute(
                "INSERT INTO responses (owner, created, beat, size, status, background, previous, conversation,"
                " response, items, id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, record.response, record.items, record.id),
            )
        if record.conversation is not None and record.status in ("completed", "incomplete"):
            db.execute(
                "INSERT OR REPLACE INTO conversations VALUES (?, ?, ?, ?)",
                (record.owner, record.conversation, record.id, record.created),
            )
        self._bound(db, record.size)

    def _get(self, db: sqlite3.Connection, owner: str, response: str) -> Record | None:
        query = f"SELECT {_COLUMNS} FROM responses WHERE id=? AND owner=? AND created>?"
        row = db.execute(query, (response, owner, self._oldest)).fetchone()
        if row is None:
            return None
        return msgspec.convert(dict(zip(Record.__struct_fields__, row, strict=True)), Record, strict=False)

    def _bound(self, db: sqlite3.Connection, size: int) -> None:
        """Remove old responses, and the oldest beyond the size limit, each time another sixteenth of that limit was
        written."""
        self._unchecked += size
        if self._unchecked < self._max_bytes // 16:
            return
        self._unchecked = 0
        db.execute("DELETE FROM responses WHERE created<=?", (self._oldest,))
        (total,) = db.execute("SELECT coalesce(sum(size), 0) FROM responses").fetchone()
        for response, length in db.execute("SELECT id, size FROM responses ORDER BY created").fetchall():
            if total <= self._max_bytes:
                break
            db.execute("DELETE FROM responses WHERE id=?", (response,))
            total -= length
        db.execute("DELETE FROM events WHERE response NOT IN (SELECT id FROM responses)")
        db.execute("DELETE FROM conversations WHERE last NOT IN (SELECT id FROM responses)")
