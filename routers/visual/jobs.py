"""Video jobs: one table for all processes that serve a model on this machine. It outlives them."""

import asyncio
import sqlite3
import time
from typing import Any, Literal
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from engine.errors import QueueFull
from engine.visual.types import VisualRequest
from multimodal.errors import shown
from routers.database import told
from routers.errors import NotFound
from routers.visual.media import MediaStore

State = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
_COLUMNS = "number, id, owner, created, state, stage, progress, ended, request, error, file"
_MOST_KEPT = 10_000
"""Jobs that have ended."""
_OPEN = "('queued', 'in_progress')"


class VideoRecord(msgspec.Struct, frozen=True):
    """A job. Times are Unix times."""

    number: int
    id: str
    owner: str
    created: float
    state: State
    stage: str | None
    progress: int
    ended: float | None
    request: VisualRequest
    """The reference image; only `take` returns it."""
    error: bytes | None
    """Envelope of the error, as JSON."""
    file: str | None
    """Name in the store of files."""


class VideoJobs:
    """Jobs of all owners, of which `max_open` may wait or be in progress, `max_own` of them of one owner; an owner
    without any may always add one.

    Clients see only jobs of `owner`.
    """

    def __init__(self, media: MediaStore, max_open: int, max_own: int | None = None) -> None:
        self.media = media
        self._news = asyncio.Event()
        """Set when this process has added or cancelled a job."""
        self._max_open = max_open
        self._max_own = max_open if max_own is None else max_own
        self._database = media.database

    @property
    def keep_seconds(self) -> float:
        return self.media.max_seconds

    async def create(self, owner: str, request: VisualRequest) -> VideoRecord:
        """Add a job. Raises QueueFull."""
        job = f"video_{uuid4().hex}"
        encoded = msgspec.msgpack.encode(replace(request, image=b""))

        def work(db: sqlite3.Connection) -> VideoRecord:
            self._forget(db)
            query = f"SELECT count(*), coalesce(sum(owner=?), 0) FROM videos WHERE state IN {_OPEN}"
            open_, own = db.execute(query, (owner,)).fetchone()
            if own and open_ >= self._max_open:
                raise QueueFull("too many videos wait already (VIDEO_MAX_JOBS)")
            if own >= self._max_own:
                raise QueueFull(
                    f"{own} videos of this API key wait or are being made already; a key may have {self._max_own} of "
                    f"the {self._max_open} of VIDEO_MAX_JOBS"
                )
            query = "INSERT INTO videos (id, owner, created, state, request) VALUES (?, ?, ?, 'queued', ?)"
            number = db.execute(query, (job, owner, time.time(), encoded)).lastrowid
            if request.image:
                db.execute("INSERT INTO video_images VALUES (?, ?)", (number, request.image))
            return _record(db, owner, job)

        record = await self._database.run(work)
        self._news.set()
        return record

    async def get(self, owner: str, job: str) -> VideoRecord:
        """Return a job. Raises NotFound."""
        return await self._database.run(lambda db: _record(db, owner, job))

    async def page(self, owner: str, limit: int, after: str | None, ascending: bool) -> tuple[list[VideoRecord], bool]:
        """Return jobs, and whether there are more after them. Raises NotFound."""

        def work(db: sqlite3.Connection) -> tuple[list[VideoRecord], bool]:
            order, sign = ("ASC", ">") if ascending else ("DESC", "<")
            place = "" if after is None else f" AND number{sign}{_record(db, owner, after).number}"
            query = f"SELECT {_COLUMNS} FROM videos WHERE owner=?{place} ORDER BY number {order} LIMIT ?"
            found = db.execute(query, (owner, limit + 1)).fetchall()
            return [_decoded(row) for row in found[:limit]], len(found) > limit

        return await self._database.run(work)

    async def cancel(self, owner: str, job: str) -> VideoRecord:
        """Cancel a job that has not ended. Raises NotFound."""

        def work(db: sqlite3.Connection) -> VideoRecord:
            record = _record(db, owner, job)
            query = f"UPDATE videos SET state='cancelled', stage=NULL, ended=? WHERE number=? AND state IN {_OPEN}"
            db.execute(query, (time.time(), record.number))
            return _record(db, owner, job)

        record = await self._database.run(work)
        self._news.set()
        return record

    async def delete(self, owner: str, job: str) -> None:
        """Remove a job and its file; one that has not ended is cancelled. Raises NotFound."""

        def work(db: sqlite3.Connection) -> None:
            record = _record(db, owner, job)
            if record.file is not None:
                self.media.remove(db, record.file)
            db.execute("DELETE FROM videos WHERE number=?", (record.number,))

        await self._database.run(work)
        self._news.set()

    async def resume(self) -> None:
        """Have done again what a process that has ended was doing."""
        query = "UPDATE videos SET state='queued', stage=NULL, progress=0 WHERE state='in_progress'"
        await self._database.run(lambda db: db.execute(query))

    async def take(self) -> VideoRecord | None:
        """Return the next waiting job and mark it as in progress; None if none waits.

        Owners take turns: the next has the fewest jobs in progress, and among these has waited the longest.
        """

        def work(db: sqlite3.Connection) -> VideoRecord | None:
            of_owner = "FROM videos AS other WHERE other.owner=videos.owner"
            running = f"(SELECT count(*) {of_owner} AND ended IS NULL AND state='in_progress')"
            order = f"{running}, (SELECT max(ended) {of_owner}), number"
            query = f"SELECT {_COLUMNS} FROM videos WHERE state='queued' ORDER BY {order} LIMIT 1"
            row = db.execute(query).fetchone()
            if row is None:
                return None
            record = _decoded(row)
            key = (record.number,)
            db.execute("UPDATE videos SET state='in_progress', stage='generating' WHERE number=?", key)
            (image,) = db.execute("SELECT image FROM video_images WHERE number=?", key).fetchone() or (b"",)
            return replace(record, request=replace(record.request, image=image))

        return await self._database.run(work)

    async def note(self, number: int, stage: str, progress: int) -> None:
        """Note the progress of a job."""
        query = "UPDATE videos SET stage=?, progress=? WHERE number=? AND state='in_progress'"
        await self._database.run(lambda db: db.execute(query, (stage, progress, number)))

    async def wanted(self, number: int) -> bool:
        """Return whether a job that is in progress has been neither cancelled nor deleted."""
        query = "SELECT 1 FROM videos WHERE number=? AND state='in_progress'"
        return await self._database.run(lambda db: db.execute(query, (number,)).fetchone() is not None)

    async def changed(self, seconds: float) -> None:
        """Wait until a client may have changed something: at once if it was in this process, else after `seconds`."""
        await told(self._news, seconds)

    async def end(
        self, number: int, state: State, file: str | None = None, error: bytes | None = None, progress: int = 0
    ) -> None:
        """Note that a job has ended or was queued again. The file of a cancelled or deleted job is removed."""

        def work(db: sqlite3.Connection) -> None:
            ended = None if state == "queued" else time.time()
            query = (
                "UPDATE videos SET state=?, stage=NULL, progress=?, ended=?, file=?, error=?"
                " WHERE number=? AND state='in_progress'"
            )
            if not db.execute(query, (state, progress, ended, file, error, number)).rowcount and file is not None:
                self.media.remove(db, file)

        await self._database.run(work)

    def _forget(self, db: sqlite3.Connection) -> None:
        """Remove jobs that ended long ago, or whose files are too old."""
        db.execute("DELETE FROM videos WHERE ended<=?", (time.time() - self.keep_seconds,))
        query = "DELETE FROM videos WHERE number <= (SELECT max(number) FROM videos) - ? AND ended IS NOT NULL"
        db.execute(query, (_MOST_KEPT,))


def _record(db: sqlite3.Connection, owner: str, job: str) -> VideoRecord:
    row = db.execute(f"SELECT {_COLUMNS} FROM videos WHERE id=? AND owner=?", (job, owner)).fetchone()
    if row is None:
        raise NotFound(f"There is no video '{shown(job)}'.", "video_id", "video_not_found")
    return _decoded(row)


def _decoded(row: tuple[Any, ...]) -> VideoRecord:
    number, job, owner, created, state, stage, progress, ended, request, error, file = row
    known = msgspec.msgpack.decode(request, type=VisualRequest)
    return VideoRecord(number, job, owner, created, state, stage, progress, ended, known, error, file)
