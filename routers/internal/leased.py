"""Answers between replicas: signs of life during the computation, frames that announce what can be read already, one
frame with the result, and then the open, silent answer as the lease of the resources that are held for the reader.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

from fastapi import HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from engine.errors import EngineNotReady
from protocol.frames import frame
from protocol.internal import ALIVE_SECONDS, MEDIA_TYPE, VERSION
from routers.body import disconnect, read_body
from routers.errors import ReplicasDiffer
from routers.state import HttpOptions, State

GRACE_SECONDS = 2.0
"""Seconds from the end of an answer, and so of its lease, until the memory that it held is freed.

The reader discards anything that it has not read by the end of the answer.
"""

log = logging.getLogger(__name__)


class LeasedWork(Protocol):
    """The work behind one answer."""

    @property
    def held(self) -> str:
        """Name of the held resource for the log, such as the KV blocks of a request."""

    @property
    def healthy(self) -> bool:
        """Whether a result can still be expected."""

    async def compute(self, announce: Callable[[bytes], Awaitable[None]]) -> tuple[bytes, bool]:
        """Return the payload, and whether a resource is held for its reader. `announce` sends a payload before that."""

    async def lost(self) -> str:
        """Wait until the held resource is lost, if that can happen, and return the reason."""

    async def close(self) -> None:
        """Release all resources. Called once nothing else runs."""


async def read_message(request: Request, options: HttpOptions, max_bytes: int) -> bytes:
    """Read a body. Raises HTTPException."""
    if request.headers.get("content-type") != MEDIA_TYPE:
        raise HTTPException(415, f"The body must be {MEDIA_TYPE}.", {"accept": MEDIA_TYPE})
    return await read_body(request, replace(options, max_body_bytes=max_bytes))


def check_fits(version: int, model: str, served: str) -> None:
    """Raise ReplicasDiffer for a message of another version, or for another model than the one that is `served`."""
    if version != VERSION:
        raise ReplicasDiffer(f"The request has version {version}; this replica reads version {VERSION}.")
    if model != served:
        raise ReplicasDiffer(f"The request is for the model {model!r}; this replica has {served!r}.")


class LeasedAnswer(Response):
    """The frames of one answer. When the client closes it, the work is closed at once.

    An error before the first frame is raised from here with nothing sent; a later one is a frame of its own.
    """

    def __init__(self, work: LeasedWork, state: State) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._work = work
        self._lease_seconds = state["http"].lease_seconds
        self._render_error = state["render_error"]
        self._started = False
        self._lease_is_over = False
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # During a lease only the end of its input shows that the client has gone (`server/http/connection.py`).
        scope.setdefault("state", {})["lease"] = True
        computing = asyncio.create_task(self._work.compute(lambda payload: self._send(send, frame(payload))))
        answering = asyncio.create_task(self._answer(scope, send, computing))
        gone = asyncio.create_task(disconnect(receive))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._lease_is_over:
                await asyncio.sleep(GRACE_SECONDS)
        finally:
            tasks: list[asyncio.Task[Any]] = [computing, answering, gone]
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                await self._work.close()
        if not answering.cancelled():
            answering.result()
        elif not self._started:
            raise ClientDisconnect

    async def _answer(self, scope: Scope, send: Send, computing: "asyncio.Task[tuple[bytes, bool]]") -> None:
        try:
            while not (await asyncio.wait({computing}, timeout=ALIVE_SECONDS))[0]:
                if not self._work.healthy:  # else the client of a stuck engine would wait as long as this replica lives
                    raise EngineNotReady("The engine gives no sign of life.")
                await self._send(send, frame())
            payload, held = computing.result()
        except Exception as error:  # whatever it was: it is rendered, here or in the application's handlers
            if not self._started:
                raise
            await self._send(send, frame(self._render_error(error, scope), failed=True), last=True)
            return
        async with asyncio.timeout(self._lease_seconds):  # also for a client that does not read
            await self._send(send, frame(payload), last=not held)
        if held:
            await self._hold(send)

    async def _hold(self, send: Send) -> None:
        """Wait until the lease has ended or the held resource is lost. Cancelled when the client no longer needs it."""
        lost = asyncio.create_task(self._work.lost())
        try:
            await asyncio.wait({lost}, timeout=self._lease_seconds)
            if lost.done():
                log.warning("%s are lost: %s", self._work.held, lost.result())
            else:
                log.warning("the lease of %s is over: not fetched in %g s", self._work.held, self._lease_seconds)
                self._lease_is_over = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            await asyncio.wait({lost})
        finally:
            lost.cancel()

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        async with self._sending:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": not last})
