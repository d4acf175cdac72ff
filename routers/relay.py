"""How a replica's answer is passed on to the client: its headers, whole bodies, and streams chunk by chunk."""

import asyncio
from collections.abc import Callable, Iterable

from fastapi import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineDied
from engine.replicas.client import ConnectionFailed, Header, ReplicaConnection
from routers.disconnect import disconnect
from routers.sse import Framing

REPLICA_HEADER = b"x-trellis-replica"
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"}
    | {b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)
_MADE_ANEW = frozenset({b"content-length", b"date", b"server", b"host", b"x-request-id", REPLICA_HEADER})
MAX_ANSWER = 256 << 20
"""Maximum bytes of an answer that is not a stream, which is kept until it is whole."""


def end_to_end(headers: Iterable[Header]) -> list[Header]:
    """Return the headers to pass on: not those of one connection, nor those that every server sets for itself."""
    headers = list(headers)
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    unwanted = _HOP_BY_HOP | _MADE_ANEW | named
    return [header for header in headers if header[0] not in unwanted]


def is_stream(headers: Iterable[Header]) -> bool:
    return any(name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers)


class WholeAnswer(Response):
    """A replica's answer that was read to its end."""

    def __init__(self, status: int, headers: list[Header], content: bytes) -> None:
        super().__init__(content, status)
        self.raw_headers = [*headers, (b"content-length", b"%d" % len(content))]


class Relay(Response):
    """A stream of events that has begun with `first`, passed on as it comes. `ends` is called once, with the outcome.

    Only the end of each chunk is looked at: the part of a line that a lost replica leaves is dropped, and an error
    event follows.
    """

    def __init__(
        self,
        connection: ReplicaConnection,
        first: bytes,
        headers: list[Header],
        ends: Callable[[str], None],
        framing: Framing,
        render_error: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(None, connection.status)
        self.raw_headers = headers
        self._connection = connection
        self._first = first
        self._ends = ends
        self._framing = framing
        self._render_error = render_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "cancelled"
        gone = asyncio.create_task(disconnect(receive))
        gone.add_done_callback(lambda task: None if task.cancelled() else self._connection.abort("the client has gone"))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            outcome = await self._pass_on(send, gone)
        finally:
            gone.cancel()
            self._ends(outcome)

    async def _pass_on(self, send: Send, gone: asyncio.Task[None]) -> str:
        """Send the body, and return the outcome."""
        chunk = self._first
        rest = b""
        """A line whose end has not come."""
        try:
            while chunk:
                if chunk[-1] == 10:  # the end of a line, as nearly always
                    await send(
                        {"type": "http.response.body", "body": rest + chunk if rest else chunk, "more_body": True}
                    )
                    rest = b""
                else:
                    end = chunk.rfind(b"\n") + 1
                    if end:
                        await send({"type": "http.response.body", "body": rest + chunk[:end], "more_body": True})
                        rest = chunk[end:]
                    else:
                        rest += chunk
                chunk = await self._connection.chunk()
        except ConnectionFailed:
            if gone.done():
                return "cancelled"
            error = self._render_error(EngineDied("The replica was lost while it answered."))
            last = b"\n\n" + self._framing.event(error)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return "lost"
        await send({"type": "http.response.body", "body": rest, "more_body": False})
        return "ok"
