"""One generation as an HTTP answer, whole or streamed; either way it ends as soon as the client has gone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from multimodal.answers.generation import Generation
from routers.sse import EventStream
from routers.state import state_of

T = TypeVar("T")


async def answer(request: Request, begin: Coroutine[Any, Any, Generation], stream: bool | None) -> Response:
    """The answer of the generation that `begin` returns: a stream of events, or one JSON object."""
    if stream:
        state = state_of(request)
        generation = await while_connected(request, begin)
        return EventStream(generation.stream(), state["http"].ping_interval, state["render_error"])
    return Response(await while_connected(request, _complete(begin)), media_type="application/json")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes: then ClientDisconnect is raised. The body must have been read."""
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


async def _complete(begin: Awaitable[Generation]) -> bytes:
    return await (await begin).complete()


async def disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has gone, or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
