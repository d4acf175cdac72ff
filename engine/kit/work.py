"""Work off the event loop: a few threads, which requests use in turns.

Three rules keep one request from delaying the others. Requests take turns, however many jobs each of them has; few jobs
of a request run at a time; and the running jobs may use a limited number of bytes, for which others wait. A job whose
waiter is cancelled before its turn never starts. A running job cannot be stopped: long work is cut into several.
"""

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MAX_BYTES = 512 << 20
"""Memory that the running jobs of a lane may take. A job that takes more runs when no other of them does."""
_CORES = len(os.sched_getaffinity(0))

_request: ContextVar[object] = ContextVar("request", default=None)


def begin_request() -> None:
    """Assign the jobs of this task, and of tasks that it creates from now on, to one request."""
    _request.set(object())


def current_request() -> Hashable:
    """Return the owner of this task's jobs: its request, or else the task itself."""
    return _request.get() or asyncio.current_task()


class FairQueue(Generic[K, T]):
    """Items that wait, by key; the keys take turns.

    A key joins at the end of the queue and leaves with its last item. With `remember` it keeps its place, and new keys
    come first, so that the key with the longest time since its last turn is always first. Use that for few keys.
    """

    def __init__(self, *, remember: bool = False) -> None:
        self._remember = remember
        self._items: OrderedDict[K, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._items.values() for item in items)

    def firsts(self) -> Iterator[tuple[K, T]]:
        """Yield each key with its first item, in the order of turns."""
        return ((key, items[0]) for key, items in self._items.items() if items)

    def add(self, key: K, item: T) -> None:
        if key not in self._items:
            self._items[key] = deque()
            self._items.move_to_end(key, last=not self._remember)
        self._items[key].append(item)

    def take(self, key: K) -> T:
        """Remove the first item of a key, whose turn this was."""
        item = self._items[key].popleft()
        self._items.move_to_end(key)
        self._forget(key)
        return item

    def remove(self, key: K, item: T) -> None:
        """Remove an item whose request has ended."""
        self._items[key].remove(item)
        self._forget(key)

    def _forget(self, key: K) -> None:
        if not self._items[key] and not self._remember:
            del self._items[key]


class Turn(NamedTuple):
    """A place that a request occupies."""

    request: Hashable
    size: int
    """Bytes."""


class Turns:
    """A few places, given to requests in turns. Use it on one event loop.

    A request has at most `per_request` places at a time.
    """

    def __init__(self, places: int, per_request: int, max_bytes: int = MAX_BYTES) -> None:
        self._free = places
        self._per_request = per_request
        self._max_bytes = max_bytes
        self._bytes = 0
        self._taken: dict[Hashable, int] = {}
        self._waiting: FairQueue[Hashable, tuple[asyncio.Future[None], int]] = FairQueue()
        """Waiting work by request."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def take(self, size: int = 0, request: Hashable = None) -> Turn:
        """Wait for a place, which the caller must `give` back, for a request: this task's own, if none is named."""
        place = Turn(request or current_request(), size)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(place.request, (turn, size))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give(place)
            else:
                self._waiting.remove(place.request, (turn, size))
                self._next()  # others may have waited behind it
            raise
        return place

    def give(self, place: Turn) -> None:
        """Take a place back."""
        self._free += 1
        self._bytes -= place.size
        self._taken[place.request] -= 1
        if not self._taken[place.request]:
            del self._taken[place.request]
        self._next()

    @asynccontextmanager
    async def place(self, size: int = 0, request: Hashable = None) -> AsyncIterator[None]:
        """Have a place during the block."""
        place = await self.take(size, request)
        try:
            yield
        finally:
            self.give(place)

    def _next(self) -> None:
        """Give free places to the requests whose turn it is. A request that gets one moves to the end of the queue."""
        given = True
        while given:
            given = False
            short = False
            for request, (turn, size) in [*self._waiting.firsts()]:
                if turn.cancelled():  # its waiter is just leaving
                    continue
                short = short or bool(size and self._bytes and self._bytes + size > self._max_bytes)
                if not self._free or self._taken.get(request, 0) >= self._per_request or (short and size):
                    continue
                self._waiting.take(request)
                self._free -= 1
                self._bytes += size
                self._taken[request] = self._taken.get(request, 0) + 1
                turn.set_result(None)
                given = True


class Lane:
    """Threads for one kind of job. At most `per_request` jobs of one request run at a time."""

    def __init__(self, name: str, threads: int, per_request: int = 1, max_bytes: int = MAX_BYTES) -> None:
        self.name = name
        self._limits = (threads, per_request, max_bytes)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"work-{name}")
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return sum(turns.waiting for turns in self._turns.values())

    async def run(self, job: Callable[[], T], size: int = 0) -> T:
        """Return the result of a job, which takes about `size` bytes of memory. Raises its errors."""
        loop = asyncio.get_running_loop()
        turns = self._turns.get(loop)
        if turns is None:
            turns = self._turns[loop] = Turns(*self._limits)
        place = await turns.take(size)

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turns.give, place)

        running = self._threads.submit(copy_context().run, job)
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)


PYTHON = Lane("python", 1)
"""Jobs that hold the GIL. One thread: with several, the event loop would wait for each in turn."""
NATIVE = Lane("native", max(1, _CORES // 2))
"""Jobs that release the GIL and take up to about 50 ms, such as a slice of a longer one."""
WHOLE = Lane("whole", max(1, _CORES // 4))
"""Jobs that release the GIL and take longer, but cannot be cut."""
NAMES = Lane("names", 32, per_request=4)
"""Look-ups of names, which wait for the network."""
FILES = Lane("files", 8, per_request=4)
"""Reading of files, which waits for a disk."""
LANES = (PYTHON, NATIVE, WHOLE, NAMES, FILES)
INLINE_LENGTH = 2000
"""Length in characters or ids up to which a job runs on the event loop, because a turn in a thread would take
longer."""


async def off_loop(length: int, job: Callable[[], T]) -> T:
    """Return the result of a Python job on data of this length: short ones run here, others in turns in a thread."""
    return job() if length <= INLINE_LENGTH else await PYTHON.run(job)
