"""Tasks that end with a block of code, concurrent coroutines, and work in threads."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time and return their results in order. The first error cancels the others and is
    raised as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* Exception as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended. Their errors are not raised."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run `work` during the block. At the end cancel it, and raise any error that it has raised."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        await cancel([task])
        if not task.cancelled():
            task.result()


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a daemon thread, so that a download does not hold up a shutdown."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # cancelling the waiter does not cancel the work

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the future is awaited; an import may leave by SystemExit
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
