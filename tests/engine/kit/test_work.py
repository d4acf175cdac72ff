"""Requests take turns, however many jobs they have; jobs without waiters never start."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable

import pytest

from engine.kit.tasks import cancel
from engine.kit.work import FairQueue, Lane, Turns, begin_request
from tests.support.waiting import until


async def ask(lane: Lane, jobs: list[Callable[[], object]], size: int = 0) -> None:
    """Run all jobs as those of one request."""
    begin_request()
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(lane.run(job, size))


class Gate:
    """Jobs that note when they start, and wait until they may go on."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self._go: defaultdict[str, threading.Event] = defaultdict(threading.Event)

    def job(self, name: str) -> Callable[[], object]:
        def work() -> None:
            self.started.append(name)
            assert go.wait(60)

        go = self._go[name]
        return work

    def let(self, *names: str) -> None:
        for name in names:
            self._go[name].set()

    def jobs(self, *names: str) -> list[Callable[[], object]]:
        return [self.job(name) for name in names]


async def test_requests_take_turns_however_many_jobs_each_has() -> None:
    gate, lane = Gate(), Lane("test", 1)
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(lane, gate.jobs("a1", "a2", "a3", "a4")))
        await until(lambda: lane.waiting == 3)
        group.create_task(ask(lane, gate.jobs("b1", "b2")))
        group.create_task(ask(lane, gate.jobs("c1")))
        await until(lambda: lane.waiting == 6)
        gate.let("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    assert gate.started == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_request_does_not_take_all_threads() -> None:
    gate, lane = Gate(), Lane("test", 3, per_request=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(lane, gate.jobs("a1", "a2", "a3", "a4")))
        await until(lambda: len(gate.started) == 2)
        group.create_task(ask(lane, gate.jobs("b1")))
        await until(lambda: "b1" in gate.started)
        assert gate.started == ["a1", "a2", "b1"]
        gate.let("a1", "a2", "a3", "a4", "b1")


async def test_jobs_of_cancelled_waiters_never_start() -> None:
    gate, lane = Gate(), Lane("test", 1)
    first = asyncio.create_task(ask(lane, gate.jobs("first")))
    await until(lambda: gate.started)
    gone = asyncio.create_task(ask(lane, gate.jobs("gone", "gone", "gone")))
    await until(lambda: lane.waiting == 3)
    await cancel([gone])
    last = asyncio.create_task(ask(lane, gate.jobs("last")))
    gate.let("first", "last")
    await asyncio.gather(first, last)
    assert gate.started == ["first", "last"]


async def test_a_cancelled_waiter_does_not_free_the_thread_that_still_works() -> None:
    gate, lane = Gate(), Lane("test", 1)
    gone = asyncio.create_task(ask(lane, gate.jobs("gone")))
    await until(lambda: gate.started)
    await cancel([gone])
    next_one = asyncio.create_task(ask(lane, gate.jobs("next")))
    await until(lambda: lane.waiting == 1)
    assert gate.started == ["gone"]
    gate.let("gone", "next")
    await next_one
    assert gate.started == ["gone", "next"]


async def test_jobs_wait_for_memory_and_those_that_need_none_do_not() -> None:
    gate, lane = Gate(), Lane("test", 4, max_bytes=100)
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(lane, gate.jobs("half"), 50))
        await until(lambda: gate.started == ["half"])
        group.create_task(ask(lane, gate.jobs("huge"), 500))
        await until(lambda: lane.waiting == 1)
        group.create_task(ask(lane, gate.jobs("small"), 10))
        await until(lambda: lane.waiting == 2)
        group.create_task(ask(lane, gate.jobs("none")))
        await until(lambda: gate.started == ["half", "none"])
        gate.let("half", "none")
        await until(lambda: gate.started == ["half", "none", "huge"])
        gate.let("huge", "small")
    assert gate.started == ["half", "none", "huge", "small"]


async def test_results_and_errors_come_back() -> None:
    lane = Lane("test", 1)
    assert await lane.run(lambda: 7) == 7
    with pytest.raises(KeyError):
        await lane.run(lambda: {}["absent"])


async def test_a_place_is_given_back_when_its_taker_is_cancelled_at_that_moment() -> None:
    turns = Turns(1, 1)
    place = await turns.take()
    waiting = asyncio.create_task(turns.take())
    await asyncio.sleep(0)
    turns.give(place)  # the waiter has its place, but does not know yet
    await cancel([waiting])
    async with asyncio.timeout(5), turns.place():
        pass


def drained(queue: FairQueue[str, int]) -> list[int]:
    return [queue.take(next(queue.firsts())[0]) for _ in range(len(queue))]


def test_keys_of_a_queue_take_turns() -> None:
    queue: FairQueue[str, int] = FairQueue()
    for number, key in enumerate("aaabbc"):
        queue.add(key, number)
    queue.remove("c", 5)
    assert list(queue) == [0, 1, 2, 3, 4]
    assert drained(queue) == [0, 3, 1, 4, 2]
    queue.add("b", 6)
    queue.add("a", 7)
    assert drained(queue) == [6, 7], "a key that had nothing joins at the end"


def test_a_queue_that_remembers_turns_puts_the_longest_ago_first() -> None:
    queue: FairQueue[str, int] = FairQueue(remember=True)
    queue.add("a", 0)
    queue.add("b", 1)
    assert drained(queue) == [1, 0], "a new key comes first"
    queue.add("a", 2)
    queue.add("b", 3)
    assert drained(queue) == [3, 2]
