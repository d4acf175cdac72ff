"""Image files, a resolver and a server that misbehave, for the tests of media loading."""

import asyncio
import base64
import io
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from PIL import Image

from multimodal.media.fetch import Fetcher
from multimodal.media.limits import MediaLimits
from multimodal.media.loader import MediaLoader

PUBLIC = "93.184.215.14"
PUBLIC_V6 = "2606:2800:21f:cb07::1"
NAMES = {
    "images.test": [PUBLIC],
    "other.test": ["93.184.215.15"],
    "both.test": [PUBLIC_V6, PUBLIC],
    "internal.test": ["10.0.0.5"],
    "mixed.test": [PUBLIC, "127.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "sub.images.test": [PUBLIC],
    "odd.test": ["not an address"],
    "nothing.test": [],
}
Answer = bytes | Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def image_file(form: str = "PNG", size: tuple[int, int] = (64, 48), **options: Any) -> bytes:
    """A picture as Pillow writes it."""
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("P" if form == "GIF" else "RGB").save(buffer, form, **options)
    return buffer.getvalue()


def png(width: int, height: int, padding: int = 0) -> bytes:
    """The header of a PNG of this size, and a body of `padding` bytes that nobody decodes."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", bytes(padding)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, data) for kind, data in chunks)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def ok(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A whole answer; `length` is what it says of the body."""
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status(code: int, *headers: str, body: bytes = b"the body is a secret") -> bytes:
    lines = [f"HTTP/1.1 {code} Whatever", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def moved(location: str, code: int = 302) -> bytes:
    """A redirect."""
    return status(code, f"Location: {location}")


class OddServer:
    """Sends prepared answers by path, raw, and counts who asks."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests = Counter[str]()
        self.heads: list[str] = []
        self.broken_off = asyncio.Event()
        """The client has closed a connection before the answer was out."""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.heads.append(head)
            self.requests[path] += 1
            answer = self.answers.get(path, status(404))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.broken_off.set()
        finally:
            writer.close()


class Detour(httpx.AsyncBaseTransport):
    """Leads every connection to one port of this machine, and notes where it was to go.

    Addresses in `dead` take no connection.
    """

    def __init__(self, port: int, **options: Any) -> None:
        self._inner = httpx.AsyncHTTPTransport(
            trust_env=False, limits=httpx.Limits(max_keepalive_connections=0), **options
        )
        self._port = port
        self.dialled: list[str] = []
        self.dead: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.dialled.append(request.url.host)
        if request.url.host in self.dead:
            raise httpx.ConnectError("nobody answers")
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


class World:
    """A loader whose names and addresses are all invented, before one real server."""

    def __init__(self, server: OddServer, limits: MediaLimits, hidden_size: int, transport: Detour) -> None:
        self.server = server
        self.transport = transport
        self.asked: list[str] = []
        self.names = {host: list(addresses) for host, addresses in NAMES.items()}
        self.loader = MediaLoader(limits, hidden_size, Fetcher(limits, self._resolve, transport))

    async def _resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.names:
            raise OSError("no such name")
        return self.names[host]


@asynccontextmanager
async def world(hidden_size: int = 0, options: dict[str, Any] | None = None, **limits: Any) -> AsyncIterator[World]:
    """A world with these limits; `options` are the transport's."""
    odd = OddServer()
    server = await asyncio.start_server(odd.serve, "127.0.0.1", 0)
    odd.port = server.sockets[0].getsockname()[1]
    made = World(odd, MediaLimits(**limits), hidden_size, Detour(odd.port, **(options or {})))
    try:
        yield made
    finally:
        await made.loader.aclose()
        server.close()
