"""Cancelling work whose client has gone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. When the client goes, cancel it and raise ClientDisconnect.

    The body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task, gone))


async def disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has gone, or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
