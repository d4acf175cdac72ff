"""Connections that are lost as soon as they are made."""

import asyncio
import random
import socket
import struct
import threading
import time
from collections import Counter

import httpx
import uvloop

from multimodal.media.fetch import Transport


def resetting(listener: socket.socket) -> None:
    """Take connections and reset them within two milliseconds."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        time.sleep(random.random() * 0.002)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


async def errors(url: str, transport: httpx.AsyncHTTPTransport, count: int, until: type | None = None) -> Counter[type]:
    """Send up to `count` requests from a busy event loop, and count their errors by type. Stop after one of the type
    `until`.
    """
    found: Counter[type] = Counter()
    async with httpx.AsyncClient(transport=transport) as client:
        while found.total() < count and until not in found:
            asking = asyncio.create_task(client.get(url))
            while not asking.done():
                time.sleep(random.random() * 0.001)  # noqa: ASYNC251 - the loop is busy
                await asyncio.sleep(0)
            found[type(asking.exception())] += 1
    return found


def test_a_connection_lost_at_once_is_an_error_of_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=resetting, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        theirs = uvloop.run(errors(url, httpx.AsyncHTTPTransport(), 10_000, until=AttributeError))
        assert AttributeError in theirs, "our transport is needed no more"
        ours = uvloop.run(errors(url, Transport(), max(100, 3 * theirs.total())))
        assert all(issubclass(error, httpx.TransportError) for error in ours), ours
        listener.shutdown(socket.SHUT_RDWR)
