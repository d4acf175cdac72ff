"""Work that several wait for at the same time, done once."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class InFlight(Generic[K, V]):
    """Shares work by key while it runs; what it came to is nobody's business here afterwards, an error least of all.

    A waiter that is cancelled leaves the work to the others; when the last one goes it is cancelled.
    """

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[V]] = {}
        self._waiters: dict[asyncio.Task[V], int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The result of `work()`, or of the work for this key that is under way. Raises what it raises."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._forget(key, done))
        self._waiters[task] = self._waiters.get(task, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiters[task] -= 1
            if not self._waiters[task]:
                del self._waiters[task]
                if not task.done():
                    self._forget(key, task)  # who comes from here on begins anew
                    task.cancel()

    async def aclose(self) -> None:
        """Give up what runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: K, task: asyncio.Task[V]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if task.done() and not task.cancelled():
            task.exception()  # the waiters have it, if there are any left
