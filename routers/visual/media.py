"""Generated files, kept on disk within limits of size and age, each for the key that requested it."""

import asyncio
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from engine.errors import EngineFailure
from engine.kit.work import FILES
from multimodal.errors import shown
from routers.database import Database, StoreUnavailable
from routers.errors import NotFound

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    name TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS files_created ON files (created);
CREATE TABLE IF NOT EXISTS videos (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, created REAL NOT NULL,
    state TEXT NOT NULL, stage TEXT, progress INTEGER NOT NULL DEFAULT 0, ended REAL, request BLOB NOT NULL,
    error BLOB, file TEXT
);
CREATE INDEX IF NOT EXISTS videos_state ON videos (state, number);
CREATE INDEX IF NOT EXISTS videos_owner ON videos (owner, ended);
CREATE TABLE IF NOT EXISTS video_images (number INTEGER PRIMARY KEY, image BLOB NOT NULL);
CREATE TRIGGER IF NOT EXISTS video_ended AFTER UPDATE OF ended ON videos WHEN NEW.ended IS NOT NULL
BEGIN DELETE FROM video_images WHERE number=NEW.number; END;
CREATE TRIGGER IF NOT EXISTS video_deleted AFTER DELETE ON videos
BEGIN DELETE FROM video_images WHERE number=OLD.number; END;
PRAGMA user_version = 1;
"""
"""Schema of the files, and of the video jobs (`jobs.py`). Their reference images are kept until a job ends."""
_STRAY_SECONDS = 3600.0
"""Age from which a file that the database does not know is removed: its process ended while it wrote."""


class StoredFile(NamedTuple):
    """A file and where it is."""

    name: str
    path: Path


class MediaStore:
    """Files in `folder`, of at most `max_bytes` together. The oldest leave when there is no room, and all after
    `max_seconds`.
    """

    def __init__(self, folder: Path, max_bytes: int, max_seconds: float) -> None:
        self.database = Database(folder / "media.sqlite", SCHEMA, "pictures and videos")
        self.max_seconds = max_seconds
        self._folder = folder / "files"
        self._max_bytes = max_bytes

    async def put(self, owner: str, data: bytes, format_: str) -> StoredFile:
        """Keep a file. It is complete or absent, whenever the process ends. Raises EngineFailure if it is too large,
        and StoreUnavailable.
        """
        if len(data) > self._max_bytes:
            raise EngineFailure("The file is larger than all that is kept (MEDIA_STORE_MB).")
        name = f"{uuid4().hex}.{format_}"
        path = self._folder / name

        def work(db: sqlite3.Connection) -> None:
            now = time.time()
            self._make_room(db, len(data), now)
            db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (name, owner, now, len(data)))
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            try:
                with partial.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

        await self.database.run(work)
        return StoredFile(name, path)

    async def get(self, owner: str, name: str) -> StoredFile:
        """Return a file. Raises NotFound."""
        query = "SELECT 1 FROM files WHERE name=? AND owner=? AND created>?"
        key = (name, owner, time.time() - self.max_seconds)
        path = self._folder / name
        known = await self.database.run(lambda db: db.execute(query, key).fetchone() is not None)
        if not known or not await FILES.run(path.is_file):
            raise no_file(name)
        return StoredFile(name, path)

    def remove(self, db: sqlite3.Connection, name: str) -> None:
        """Remove a file, within a transaction."""
        (self._folder / name).unlink(missing_ok=True)
        db.execute("DELETE FROM files WHERE name=?", (name,))

    async def clean(self) -> None:
        """Remove files that are too old, or that the database does not know."""

        def work(db: sqlite3.Connection) -> None:
            self._make_room(db, 0, time.time())
            known = {name for (name,) in db.execute("SELECT name FROM files")}
            for path in self._strays(known):
                path.unlink(missing_ok=True)

        if self.database.path.exists():
            await self.database.run(work)

    async def close(self) -> None:
        await self.database.close()

    def _strays(self, known: set[str]) -> Iterator[Path]:
        for path in self._folder.glob("*"):
            if path.name not in known and path.stat().st_mtime < time.time() - _STRAY_SECONDS:
                yield path

    def _make_room(self, db: sqlite3.Connection, size: int, now: float) -> None:
        (excess,) = db.execute("SELECT coalesce(sum(size), 0) FROM files").fetchone()
        excess += size - self._max_bytes
        for name, created, its_size in db.execute("SELECT name, created, size FROM files ORDER BY created").fetchall():
            if excess <= 0 and created > now - self.max_seconds:
                break
            self.remove(db, name)
            excess -= its_size


async def clean_for_ever(store: MediaStore, pause: float = 600.0) -> None:
    """Remove old files from time to time."""
    while True:
        with suppress(StoreUnavailable):  # it is logged
            await store.clean()
        await asyncio.sleep(pause)


def no_file(name: str) -> NotFound:
    """Return the error for a file that is not stored, or no longer."""
    return NotFound(f"There is no file '{shown(name)}' (any more).", "file", "file_not_found")
