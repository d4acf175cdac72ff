"""Turns of guides in the pool of grammar workers, with workers that the test holds up."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.embedded.grammar import pool as module
from engine.embedded.grammar.client import WorkerKilledError
from engine.embedded.grammar.library import Setup
from engine.embedded.grammar.pool import WorkerPool
from engine.embedded.grammar.worker import Reply
from engine.errors import EngineUnavailable
from engine.types import Guide
from tests.support.waiting import until

LARGE = [Guide("regex", "x" * (2000 + index)) for index in range(10)]
SMALL = Guide("regex", "a")
SCHEMA = Guide("json_schema", "{}")


class HeldWorker:
    """A worker that answers when its guide is released."""

    started: list[Guide]
    released: dict[Guide, asyncio.Event]
    kills: int

    def __init__(self, _: Setup) -> None:
        self.alive = True

    async def start(self) -> None:
        self.alive = True

    async def compile(self, guide: Guide, _: float) -> Reply:
        type(self).started.append(guide)
        if type(self).kills:
            type(self).kills -= 1
            self.alive = False
            raise WorkerKilledError
        self._guide = guide
        await self.released.setdefault(guide, asyncio.Event()).wait()
        if not self.alive:
            raise WorkerKilledError
        return Reply()

    def kill(self) -> None:
        self.alive = False
        self.released.pop(self._guide).set()

    async def close(self) -> None:
        pass


@pytest_asyncio.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerPool]:
    HeldWorker.started, HeldWorker.released, HeldWorker.kills = [], {}, 0
    monkeypatch.setattr(module, "GrammarWorker", HeldWorker)
    pool = WorkerPool(Setup("llguidance", "", 1, ()), 2)
    yield pool
    await pool.close()


def submit(pool: WorkerPool, guides: list[Guide]) -> list["asyncio.Task[Reply]"]:
    return [asyncio.create_task(pool.compile(guide, 1.0)) for guide in guides]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def end(tasks: list["asyncio.Task[Reply]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_guides_of_one_kind_and_size_leave_a_worker_to_others(pool: WorkerPool) -> None:
    tasks = submit(pool, LARGE)
    await settle()
    assert HeldWorker.started == LARGE[:1]
    tasks += submit(pool, [SCHEMA])
    await settle()
    assert HeldWorker.started == [LARGE[0], SCHEMA]
    await end(tasks)


async def test_lanes_take_turns(pool: WorkerPool) -> None:
    tasks = submit(pool, LARGE)
    await settle()
    tasks += submit(pool, [SCHEMA])
    await settle()
    tasks += submit(pool, [SMALL])
    HeldWorker.released[LARGE[0]].set()
    await settle()
    assert HeldWorker.started[2:] == [SMALL], "the large ones have just had a turn"
    HeldWorker.released[SCHEMA].set()
    await settle()
    assert HeldWorker.started[3:] == LARGE[1:2]
    await end(tasks)


async def test_slow_lanes_together_leave_a_worker_to_others(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.0)
    large, medium = LARGE[0], Guide("regex", "x" * 500)
    tasks = submit(pool, [large, medium])
    await settle()
    assert HeldWorker.started == [large, medium], "nobody knows yet that they are slow"
    await until(lambda: len(pool._slow_until) == 2)
    tasks += submit(pool, [SCHEMA])
    await settle()
    assert HeldWorker.started[2:] == [SCHEMA], "the one that began last gives way"
    HeldWorker.released[SCHEMA].set()
    await settle()
    assert HeldWorker.started[3:] == [], "and leaves the worker free, since its lane is slow"
    HeldWorker.released[large].set()
    await settle()
    assert HeldWorker.started[3:] == [medium]
    HeldWorker.released[medium].set()
    assert await asyncio.gather(*tasks) == [Reply()] * 3


async def test_slow_guides_go_on_while_no_quick_one_waits(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.0)
    tasks = submit(pool, [LARGE[0], SMALL])
    await settle()
    await until(lambda: len(pool._slow_until) == 2)
    tasks += submit(pool, LARGE[1:2])
    await settle()
    assert HeldWorker.started == [LARGE[0], SMALL]
    await end(tasks)


async def test_a_guide_whose_caller_left_is_never_compiled(pool: WorkerPool) -> None:
    tasks = submit(pool, LARGE[:3])
    await settle()
    await end(tasks[1:2])
    HeldWorker.released[LARGE[0]].set()
    await settle()
    assert HeldWorker.started == [LARGE[0], LARGE[2]]
    await end(tasks)


async def test_the_queue_is_bounded(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 2)
    tasks = submit(pool, LARGE[:3])
    await settle()
    with pytest.raises(EngineUnavailable, match="too many"):
        await pool.compile(LARGE[3], 1.0)
    await end(tasks)
    monkeypatch.setattr(module, "_MAX_WAITING_BYTES", 100)
    tasks = submit(pool, LARGE[:2])
    await settle()
    with pytest.raises(EngineUnavailable, match="too many"):
        await pool.compile(SMALL, 1.0)
    await end(tasks)


@pytest.mark.parametrize("kills", [1, 2])
async def test_a_killed_worker_costs_one_retry(pool: WorkerPool, kills: int) -> None:
    HeldWorker.kills = kills
    HeldWorker.released[SMALL] = asyncio.Event()
    HeldWorker.released[SMALL].set()
    if kills == 1:
        assert await pool.compile(SMALL, 1.0) == Reply()
    else:
        with pytest.raises(EngineUnavailable, match="was killed"):
            await pool.compile(SMALL, 1.0)
    assert HeldWorker.started == [SMALL] * 2
    assert await pool.compile(SMALL, 1.0) == Reply()


async def test_no_worker_is_started_after_the_end(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that was given up may come to its end later."""
    tasks = submit(pool, [SMALL])
    await settle()
    started = []
    monkeypatch.setattr(HeldWorker, "start", lambda self: started.append(self))
    for worker in pool._workers:
        worker.alive = False  # type: ignore[misc]
    tasks[0].cancel()
    await pool.close()
    await end(tasks)
    assert started == []
