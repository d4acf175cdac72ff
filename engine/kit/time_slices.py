"""Time slices for threads that read files: one that takes long to read does not hold up the others.

A few works compute at a time. One that has computed for a slice while others wait gives its place to the one that has
waited longest, when it calls itself between two pieces. Memory is counted in a `Room`, for which a work waits without a
place.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

_SECONDS = 0.2
_POLL_SECONDS = 0.2
"""Time between two looks whether a work that waits for memory is still wanted."""


class Room:
    """A limit to what works hold at once, such as pixels, given in the order in which they ask.

    Small amounts, of at most `small`, share a `reserve` of their own, so that they do not wait for large ones.
    """

    def __init__(self, most: int, *, small: int, reserve: int) -> None:
        self._small = small
        self._large_share, self._small_share = _Share(most), _Share(max(reserve, small))

    @property
    def waiting(self) -> int:
        """Number of works that wait for room."""
        return len(self._large_share.queue) + len(self._small_share.queue)

    def full(self, count: int) -> bool:
        """Return whether `take` would wait."""
        share = self._share(count)
        return bool(share.queue) or share.free < min(count, share.most)

    def take(self, count: int, going_on: Callable[[], bool]) -> Callable[[], None]:
        """Wait until there is room for `count`; if it never fits, until all room is free. Return what gives it back.

        Once `going_on` returns False, nothing is taken.
        """
        share = self._share(count)
        taken = share.take(count, going_on)
        return lambda: share.give(taken)

    def _share(self, count: int) -> "_Share":
        return self._small_share if count <= self._small else self._large_share


class _Share:
    def __init__(self, most: int) -> None:
        self.most = most
        self.free = most
        self.queue: deque[object] = deque()
        self._changed = threading.Condition()

    def take(self, count: int, going_on: Callable[[], bool]) -> int:
        count, ticket = min(count, self.most), object()
        with self._changed:
            self.queue.append(ticket)
            try:
                while self.queue[0] is not ticket or self.free < count:
                    if not going_on():
                        return 0
                    self._changed.wait(_POLL_SECONDS)
                self.free -= count
                return count
            finally:
                self.queue.remove(ticket)
                self._changed.notify_all()

    def give(self, count: int) -> None:
        with self._changed:
            self.free += count
            self._changed.notify_all()


class TimeSlices:
    """Places for a number of works that compute at a time, given in turns of about `seconds`."""

    def __init__(self, places: int, seconds: float = _SECONDS) -> None:
        self.seconds = seconds
        self._free = places
        self._waiting: deque[threading.Event] = deque()
        self._works: dict[int, SlicedWork] = {}
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of works that wait for their turns."""
        return len(self._waiting)

    def begin(self, number: int = 0, going_on: Callable[[], bool] = lambda: True) -> "SlicedWork":
        """Return a work with this number, for as long as `going_on` returns True. The caller must `end` it."""
        work = SlicedWork(self, number, going_on)
        with self._lock:
            self._works[id(work)] = work
        return work

    def longest(self) -> tuple[int, float] | None:
        """Return number and seconds of the work that has computed for longest; None without any work."""
        with self._lock:
            works = [(work.seconds, work.number) for work in self._works.values()]
        return max(works)[::-1] if works else None

    def take(self) -> None:
        """Wait for a place."""
        turn = threading.Event()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            self._waiting.append(turn)
        turn.wait()

    def give(self) -> None:
        """Give a place to the work that has waited longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._free += 1

    def forget(self, work: "SlicedWork") -> None:
        with self._lock:
            self._works.pop(id(work), None)


class SlicedWork:
    """The reading of a file, by one thread at a time, which has a place between `start` and `stop`.

    Called between two pieces, it lets others have their turns, then returns whether to go on.
    """

    def __init__(self, slices: TimeSlices, number: int, going_on: Callable[[], bool]) -> None:
        self.number = number
        self._slices = slices
        self._going_on = going_on
        self._spent = 0.0
        self._since: float | None = None
        self._held: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self) -> bool:
        since = self._since
        if since is not None and self._slices.waiting and time.monotonic() - since >= self._slices.seconds:
            self.stop()
            self.start()
        return self._going_on()

    @property
    def seconds(self) -> float:
        """Time that it has computed, without the turns of others."""
        since = self._since
        return self._spent + (0.0 if since is None else time.monotonic() - since)

    def start(self) -> None:
        self._slices.take()
        self._since = time.monotonic()

    def stop(self) -> None:
        """Give the place back, if it has one."""
        if self._since is not None:
            self._spent, self._since = self.seconds, None
            self._slices.give()

    def hold(self, room: Room, count: int, before: Callable[[], None] = lambda: None) -> None:
        """Wait for room, which it has until `leave` or its end, and for a place again. If it has to wait, `before` is
        called first."""
        if room.full(count):
            before()
        self.stop()
        self._held.append(room.take(count, self._going_on))
        self.start()

    def leave(self) -> None:
        """Give back all room."""
        while self._held:
            self._held.pop()()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Count the block as time that it computes, without a place."""
        assert self._since is None
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._spent, self._since = self.seconds, None

    def end(self) -> None:
        self.stop()
        self.leave()
        self._slices.forget(self)
