"""Turns of works that compute for long, and the memory for which they wait."""

import threading
from collections.abc import Callable

import pytest

from engine.kit import time_slices
from engine.kit.time_slices import Room, SlicedWork, TimeSlices
from tests.support.waiting import until


def begun(job: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


async def test_works_take_turns() -> None:
    """Every piece is longer than a slice, so that each work has one piece in each round."""
    slices, order = TimeSlices(1, seconds=0.0), list[str]()

    def read(name: str, pieces: int) -> None:
        with slices.begin() as work:
            for _ in range(pieces):
                order.append(name)
                work()

    threads = []
    with slices.begin():
        for place, (name, pieces) in enumerate((("a", 4), ("b", 4), ("c", 1)), 1):
            threads.append(begun(lambda name=name, pieces=pieces: read(name, pieces)))  # type: ignore[misc]
            await until(lambda place=place: slices.waiting == place)  # type: ignore[misc]
    for thread in threads:
        thread.join(10)
    assert "".join(order) == "abcababab"


async def test_a_work_keeps_its_place_for_a_slice_and_while_it_is_alone() -> None:
    slices, other = TimeSlices(1, seconds=3600.0), threading.Event()
    with slices.begin() as work:
        thread = begun(lambda: (slices.begin().start(), other.set()))
        await until(lambda: slices.waiting)
        assert work() and not other.is_set()
    thread.join(10)
    assert other.is_set()


def test_a_work_counts_its_own_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time_slices.time, "monotonic", lambda: now)
    slices = TimeSlices(1)
    assert slices.longest() is None
    work = slices.begin(7)
    now = 5.0
    assert slices.longest() == (7, 0.0)
    work.start()
    now = 8.0
    assert slices.longest() == (7, 3.0)
    work.stop()
    now = 20.0
    with work.elsewhere():
        now = 21.0
        assert slices.longest() == (7, 4.0)
    work.end()
    assert slices.longest() is None


def test_a_work_that_nobody_wants_ends() -> None:
    with TimeSlices(1).begin(going_on=lambda: False) as work:
        assert not work()


class Rooms:
    """Works that ask for room one after another, each in a thread, and keep it until they may go."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.slices = TimeSlices(1)
        self.have: list[int] = []
        self.works: dict[int, SlicedWork] = {}

    async def ask(self, count: int, going_on: Callable[[], bool] = lambda: True) -> None:
        work = self.works[count] = self.slices.begin(count, going_on)

        def hold() -> None:
            work.start()
            work.hold(self.room, count)
            self.have.append(count)
            work.stop()

        asked = self.room.waiting + len(self.have)
        begun(hold)
        await until(lambda: self.room.waiting + len(self.have) > asked)


async def test_room_is_given_in_order_and_small_amounts_pass() -> None:
    rooms = Rooms(Room(100, small=5, reserve=10))
    for count in (40, 60, 1000, 20, 5, 4):
        await rooms.ask(count)
    await until(lambda: len(rooms.have) == 4)
    assert rooms.have == [40, 60, 5, 4]
    await rooms.ask(3)
    rooms.works[40].end()
    rooms.works[4].end()
    await until(lambda: len(rooms.have) == 5)
    assert rooms.have[-1] == 3, "1000 waits for all room, and 20 behind it"
    rooms.works[60].end()
    await until(lambda: len(rooms.have) == 6)
    assert rooms.have[-1] == 1000
    rooms.works[1000].leave()
    await until(lambda: len(rooms.have) == 7)


async def test_a_work_that_nobody_wants_does_not_wait_for_room() -> None:
    rooms, wanted = Rooms(Room(100, small=0, reserve=0)), threading.Event()
    wanted.set()
    for count in (100, 90):
        await rooms.ask(count, wanted.is_set)
    wanted.clear()
    await until(lambda: len(rooms.have) == 2)
    rooms.works[100].end()
    rooms.works[90].end()
    await rooms.ask(99)
    await until(lambda: rooms.have[-1] == 99)


def test_before_a_wait_for_room_a_work_may_give_up_what_it_has() -> None:
    room, called = Room(100, small=0, reserve=0), list[str]()
    first, second = TimeSlices(1).begin(), TimeSlices(1).begin(going_on=lambda: False)
    first.hold(room, 1000, lambda: called.append("first"))
    second.hold(room, 1, lambda: called.append("second"))
    assert called == ["second"]
