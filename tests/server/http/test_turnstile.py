"""A burst of starts is spread over turns of the loop, in order, and nothing is lost to cancellation."""

import asyncio

from server.http.middleware import Turnstile


async def test_a_few_in_each_turn_and_in_order() -> None:
    turnstile, turns, passed = Turnstile(3), 0, list[tuple[int, int]]()

    async def count_turns() -> None:
        nonlocal turns
        while len(passed) < 10:
            await asyncio.sleep(0)
            turns += 1

    async def begin(number: int) -> None:
        await turnstile.enter()
        passed.append((turns, number))

    await asyncio.gather(count_turns(), *(begin(number) for number in range(10)))
    assert [number for _, number in passed] == list(range(10))
    assert max([turn for turn, _ in passed].count(turn) for turn in range(turns)) <= 3


async def test_alone_nobody_waits() -> None:
    turnstile = Turnstile(1)
    for _ in range(3):
        entering = turnstile.enter()
        try:
            entering.send(None)
        except StopIteration:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            raise AssertionError("waited")


async def test_a_cancelled_caller_takes_no_place() -> None:
    turnstile = Turnstile(1)
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.wait_for(tasks[4], 20)
    await asyncio.wait_for(turnstile.enter(), 20)
