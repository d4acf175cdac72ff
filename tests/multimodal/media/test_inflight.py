"""Work with several waiters is done once, also if some of them leave."""

import asyncio

import pytest

from multimodal.media.inflight import InFlight


class Work:
    """Runs until it is told how to end."""

    def __init__(self) -> None:
        self.runs = self.cancelled = 0
        self.gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> str:
        self.runs += 1
        try:
            return await asyncio.shield(self.gate)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def waiting(shared: InFlight[str, str], work: Work, count: int) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(shared.do("key", work)) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_shared_work_runs_once_and_all_waiters_get_the_result() -> None:
    shared, work = InFlight[str, str](), Work()
    tasks = await waiting(shared, work, 3)
    work.gate.set_result("done")
    assert await asyncio.gather(*tasks) == ["done"] * 3
    assert (work.runs, len(shared)) == (1, 0)


async def test_a_cancelled_waiter_neither_ends_nor_breaks_it() -> None:
    shared, work = InFlight[str, str](), Work()
    first, second = await waiting(shared, work, 2)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled() and not work.cancelled
    work.gate.set_result("done")
    assert await second == "done"


async def test_without_waiters_it_is_cancelled_and_the_next_begins_anew() -> None:
    shared, work = InFlight[str, str](), Work()
    tasks = await waiting(shared, work, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    again = asyncio.create_task(shared.do("key", work))
    await asyncio.sleep(0.01)
    assert (work.cancelled, work.runs) == (1, 2)
    work.gate.set_result("new")
    assert await again == "new"


async def test_all_get_an_error_and_it_is_not_kept() -> None:
    shared, work = InFlight[str, str](), Work()
    tasks = await waiting(shared, work, 2)
    work.gate.set_exception(ValueError("no"))
    for task in tasks:
        with pytest.raises(ValueError, match="no"):
            await task
    work.gate = asyncio.get_running_loop().create_future()
    work.gate.set_result("yes")
    assert await shared.do("key", work) == "yes"
    assert work.runs == 2


async def test_keys_are_apart() -> None:
    shared = InFlight[int, int]()

    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    assert await asyncio.gather(*(shared.do(n, lambda n=n: double(n)) for n in range(4))) == [0, 2, 4, 6]  # type: ignore[misc]
