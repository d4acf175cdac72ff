"""An SQLite file, whose calls run in a thread."""

import asyncio
import fcntl
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from engine.errors import EngineUnavailable
from engine.kit.work import Lane

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds for which a call waits for other calls and for other processes' locks."""
_LEAST_PATIENCE = 0.02
"""The same for a call that has waited so long for other calls already."""

log = logging.getLogger(__name__)


class StoreUnavailable(EngineUnavailable):
    """A file cannot be read or written, for example because the disk is full."""


async def work_elected(
    database: Path, work: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]], what: str
) -> None:
    """Call `work` until cancelled, with pauses, while no other process with the database does. Raises CancelledError
    only. `what` names the work for the log.
    """
    while True:
        try:
            if database.exists():  # noqa: ASYNC240 - a look at a local file
                async with _elected(database) as mine:
                    if mine:
                        await work()
        except StoreUnavailable:  # it is logged
            pass
        except Exception:  # of any kind: work goes on once it is gone
            log.exception("%s have stopped for now", what)
        await pause()


async def told(news: asyncio.Event, seconds: float) -> None:
    """Wait until `news` is set, `seconds` at most, and clear it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # asyncio.wait_for of Python 3.11 may swallow a cancellation
            await news.wait()
    news.clear()


@asynccontextmanager
async def _elected(database: Path) -> AsyncIterator[bool]:
    """Lock a file beside a database during the block, and yield whether that succeeded: no other process has it. The
    lock ends with the process.
    """
    with database.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


class Database:
    """Opens `path` at the first call, makes its tables by `schema`, and shares it with other processes (WAL)."""

    def __init__(self, path: Path, schema: str, what: str) -> None:
        self.path = path
        self._schema = schema
        self._what = what
        """Name of the contents, for error messages."""
        self._lane = Lane(what, 1)
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`, which is one transaction, and is done even if the caller is cancelled. Raises
        StoreUnavailable.
        """
        until = time.monotonic() + _PATIENCE

        def job() -> T:
            patience = max(_LEAST_PATIENCE, until - time.monotonic())
            try:
                db = self._connection or self._open(patience)
                db.execute(f"PRAGMA busy_timeout={round(1000 * patience)}")
                with db:
                    db.execute("BEGIN IMMEDIATE")
                    return work(db)
            except (sqlite3.Error, OSError) as error:
                log.error("the store of %s failed at %s: %s", self._what, self.path, error)
                raise StoreUnavailable(f"The store of {self._what} does not work.") from error

        return await asyncio.shield(asyncio.ensure_future(self._lane.run(job)))

    async def close(self) -> None:
        def job() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        await self._lane.run(job)

    def _open(self, patience: float) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(0o600)
        db = sqlite3.connect(self.path, timeout=patience, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(self._schema)
        self._connection = db
        return db
