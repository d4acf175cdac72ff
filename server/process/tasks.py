"""Background work that somebody waits for: tasks that end with a block, and work in threads."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def one_line(error: Exception) -> str:
    """What went wrong: the first line and the last, which of a process' last words is the error itself."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}"


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run `work` meanwhile; at the end it is cancelled, and what it raised before is raised."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread that nobody waits for at exit: a download does not hold up a shutdown."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(settle_future: Callable[[Any], None], value: Any) -> None:
        if not future.cancelled():
            settle_future(value)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = (future.set_result, work())
        except Exception as error:  # raised where the future is awaited
            outcome = (future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future
