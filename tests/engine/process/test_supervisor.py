"""When the supervisor restarts a process, and when it does not."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from engine.process import supervisor as module
from engine.process.supervisor import End, Supervisor


def lives(*ends: End) -> Callable[[], Awaitable[End]]:
    remaining = iter(ends)

    async def live() -> End:
        return next(remaining)

    return live


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Pauses are a thousand times shorter; returns those that were logged."""
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0005)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.003)
    return lambda: [record.getMessage().split()[2] for record in caplog.records]


async def test_pauses_grow_up_to_a_limit_until_an_end_is_final(pauses: Callable[[], list[str]]) -> None:
    ends = [End(f"death {number}") for number in range(5)]
    assert await Supervisor(lives(*ends, End("the last", final=True))).run() == "the last"
    assert pauses() == ["0.0005", "0.001", "0.002", "0.003", "0.003"]


async def test_the_end_of_a_process_is_logged_without_its_repeated_output(
    pauses: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    assert await Supervisor(lives(End("it died\nits last\nwords"), End("b\nc", final=True))).run() == "b\nc"
    assert caplog.messages == ["restarting in 0.0005 s: it died"]


async def test_a_process_that_served_long_enough_starts_over(pauses: Callable[[], list[str]]) -> None:
    ends = [End("a"), End("b", 9), End("c", 11), End("d", 1), End("e", 1), End("f", 99), End("g", final=True)]
    await Supervisor(lives(*ends)).run()
    assert pauses() == ["0.0005", "0.001", "once:", "0.0005", "0.001", "once:"]


async def test_a_prepared_process_starts_at_once(pauses: Callable[[], list[str]]) -> None:
    ends = [End("a"), End("b", prepared=True), End("c"), End("d", final=True)]
    await Supervisor(lives(*ends)).run()
    assert pauses() == ["0.0005", "once:", "0.001"]


async def test_stop_ends_a_pause_and_lets_a_life_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 60.0)
    supervisor = Supervisor(lives(End("first"), End("second")))
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0.01)
    began = time.monotonic()
    supervisor.stop()
    assert await running == "first" and time.monotonic() - began < 20
    assert await supervisor.run() == "second"
