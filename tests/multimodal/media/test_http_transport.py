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


async def errors(url: str, transport: httpx.AsyncHTTPTransport) -> Counter[type]:
    """Of 300 requests by a busy event loop."""
    found: Counter[type] = Counter()
    async with httpx.AsyncClient(transport=transport) as client:
        for _ in range(300):
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
        assert AttributeError in uvloop.run(errors(url, httpx.AsyncHTTPTransport())), "our transport is needed no more"
        assert uvloop.run(errors(url, Transport())).keys() <= {
            httpx.ConnectError,
            httpx.ReadError,
            httpx.RemoteProtocolError,
        }
        listener.shutdown(socket.SHUT_RDWR)
