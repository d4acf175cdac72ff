"""What storms share: their seeds, clients that stop reading, and the memory of a server."""

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import psutil

from tests.support.servers import ServerProcess

SEEDS = range(int(os.environ.get("STORM_SEEDS", "2")))
"""More of them: `STORM_SEEDS=20 make test-slow ARGS=tests/e2e`."""
TEXT = "the storm goes on "


def memory(server: ServerProcess) -> int:
    """Bytes in the memory of all processes of a server."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    return sum(process.memory_info().rss for process in processes)


def request(path: str, body: dict[str, object], host: str = "test") -> bytes:
    """A whole POST."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


@asynccontextmanager
async def connected(url: str, window: int = 0) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection; `window` is the size of the kernel's buffer for what is not read, 0 for the usual one."""
    parts = urlsplit(url)
    client = socket.socket()
    client.setblocking(False)
    if window:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    await asyncio.get_running_loop().sock_connect(client, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=window or 1 << 16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def right(client: httpx.AsyncClient) -> bool:
    """Whether a plain request gets the right answer; another one is logged."""
    answer = await client.post("/v1/completions", json={"model": "fake", "prompt": TEXT, "max_tokens": 16})
    if answer.status_code == 200 and TEXT.startswith(answer.json()["choices"][0]["text"]):
        return True
    logging.getLogger(__name__).error("%d: %s", answer.status_code, answer.text)
    return False
