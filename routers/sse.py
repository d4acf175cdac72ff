"""Streams of server-sent events, framed as OpenAI does, on sse-starlette's EventSourceResponse.

Compared with it: the status waits for the first event, so that errors found before it get one of their own; events come framed and are
sent without a lock, a timer or a log line for each; keep-alive comments are sent in silence only; and a shutdown lets streams run
(`server/process/serving.py` waits for them).
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import anyio
from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus
from starlette.types import Send

AppStatus.enable_automatic_graceful_drain = False

_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"


class EventStream(EventSourceResponse):
    """A stream of JSON `payloads`, ended by `[DONE]`, or by one error event if they fail midway.

    What `payloads` raises before the first is raised from here, with nothing sent. They are closed as soon as the client has gone.
    """

    def __init__(
        self, payloads: AsyncGenerator[bytes, None], ping_interval: float, render_error: Callable[[Exception], bytes]
    ) -> None:
        super().__init__(payloads, headers={"Cache-Control": "no-cache"}, ping=ping_interval, sep="\n")
        self._payloads = payloads
        self._render_error = render_error
        self._last_sent = math.inf
        """By the loop's clock; infinite until the headers are sent."""

    async def _stream_response(self, send: Send) -> None:
        """In a task of its own, since anyio cancels again and again, and would not let `payloads` finish closing."""
        task = asyncio.create_task(self._send_events(send))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": task.result(), "more_body": False})

    async def _send_events(self, send: Send) -> bytes:
        """Send all but the last event, which is returned."""
        clock = asyncio.get_running_loop().time
        async with aclosing(self._payloads) as payloads:
            payload = await anext(payloads)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await send({"type": "http.response.body", "body": b"data: " + payload + b"\n\n", "more_body": True})
                self._last_sent = clock()
                async for payload in payloads:
                    await send({"type": "http.response.body", "body": b"data: " + payload + b"\n\n", "more_body": True})
                    self._last_sent = clock()
            except Exception as error:  # whatever it was: the client must not take the stream for complete
                return b"data: " + self._render_error(error) + b"\n\n"
        return _DONE

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        silence = 0.0
        while self.active:
            await anyio.sleep(self.ping_interval - silence)
            silence = max(clock() - self._last_sent, 0.0)
            if silence >= self.ping_interval:
                async with self._send_lock:
                    if self.active:
                        await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
                silence = 0.0
                self._last_sent = clock()
