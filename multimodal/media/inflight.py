"""Work for which several tasks wait at the same time, done once."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class InFlight(Generic[K, V]):
    """Shares work by key while it runs. Results and errors are not kept once every waiter has them.

    A cancelled waiter leaves the work to the others. When the last one is cancelled, so is the work.
    """

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[V]] = {}
        self._waiters: dict[asyncio.Task[V], int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    async def do(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Return the result of the running work for this key, or else of `work()`. Raises its errors."""
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
                    self._forget(key, task)  # the next caller begins anew
                    task.cancel()

    async def aclose(self) -> None:
        """Cancel all running work."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: K, task: asyncio.Task[V]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if task.done() and not task.cancelled():
            task.exception()  # mark it as retrieved: there may be no waiter left
