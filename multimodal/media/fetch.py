"""GET over http and https, guarded: a host's name is resolved once, all its addresses are checked, and one of them is
dialled.

The transport is used without httpx's client: no cookies, proxies or credentials, and only the redirects followed here.
Each connection serves one request: a pool is keyed by address, and would reuse a connection whose certificate was
checked for another name.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from ipaddress import ip_address

import httpx

from engine.kit.work import NAMES
from multimodal.errors import InvalidMedia, MediaError, MediaTimeout
from multimodal.media.limits import MediaLimits
from multimodal.media.url import Address, Url, host_allowed, may_fetch, redirected

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""Return the addresses of a host and port, best first. Raises OSError or UnicodeError."""
MAX_REDIRECTS = 3
CONNECT_SECONDS = 5.0
"""Time to connect to each address."""
SLOW_SECONDS = 5.0
MIN_RATE = 4096
"""Minimum average rate of a body in bytes per second, after the first seconds, because others wait for its place."""
_MAX_ADDRESSES = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Transport(httpx.AsyncHTTPTransport):
    """httpx's own transport, which raises `httpx.ConnectError` for a connection that is lost as soon as it is made.

    With anyio 4 on uvloop that is an AttributeError: anyio reads the address of a socket that uvloop has closed
    already.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("the connection was lost as soon as it was made", request=request) from error


class Fetcher:
    """Fetches files. Tests pass their own `transport` and `resolve`."""

    def __init__(
        self, limits: MediaLimits, resolve: Resolver | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._limits = limits
        self._resolve = resolve or _look_up
        self._transport = transport or Transport(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    async def fetch(self, url: Url, most: int) -> bytes:
        """Return the body of a response with status 200 and `most` bytes, after redirects. Raises MediaError."""
        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(url, most)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except (TimeoutError, httpx.TimeoutException) as error:
            raise MediaTimeout(f"A file did not come within {self._limits.timeout_seconds:g} seconds.") from error
        except httpx.HTTPError as error:
            raise MediaError("The server of a file cannot be reached, or broke off its answer.") from error
        raise MediaError(f"A file's URL redirects more than {MAX_REDIRECTS} times.")

    async def aclose(self) -> None:
        """Close all connections. Threads that are resolving names end by themselves."""
        await self._transport.aclose()

    async def _get(self, url: Url, most: int) -> bytes | Url:
        """Return the body, or the URL that the response redirects to."""
        response = await self._dial(url, await self._addresses(url))
        try:
            if response.status_code in _REDIRECTS and (location := response.headers.get("location")):
                return redirected(url, location)
            if response.status_code != httpx.codes.OK:
                raise MediaError(f"The server of a file answered with status {response.status_code}.")
            return await self._body(response, most)
        finally:
            await response.aclose()

    async def _addresses(self, url: Url) -> list[Address]:
        """Resolve the URL's host. Raises MediaError if any of its addresses may not be fetched from."""
        if not host_allowed(url.host, self._limits.allowed_hosts):
            raise MediaError("This server does not fetch files from the host of a file's URL.")
        try:
            found = (
                [url.address] if url.address else [ip_address(text) for text in await self._resolve(url.host, url.port)]
            )
        except (OSError, UnicodeError, ValueError) as error:
            raise MediaError("The host of a file's URL has no address.") from error
        if not found or not all(may_fetch(address, allow_private=self._limits.allow_private) for address in found):
            raise MediaError("The host of a file's URL has no address that this server may fetch from.")
        return list(dict.fromkeys(found))[:_MAX_ADDRESSES]

    async def _dial(self, url: Url, addresses: list[Address]) -> httpx.Response:
        """Return the response, without its body, of the first address that accepts a connection."""
        for address in addresses[:-1]:
            try:
                return await self._transport.handle_async_request(self._request(url, address))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return await self._transport.handle_async_request(self._request(url, addresses[-1]))

    def _request(self, url: Url, address: Address) -> httpx.Request:
        """Return a request to `address` that names the URL's host in TLS and HTTP."""
        seconds = self._limits.timeout_seconds
        return httpx.Request(
            "GET",
            httpx.URL(scheme=url.scheme, host=address.compressed, port=url.port),
            headers={
                "host": url.authority,
                "accept": "image/*, video/*, audio/*, application/octet-stream;q=0.9",
                "accept-encoding": "identity",
                "connection": "close",
                "user-agent": "trellis",
            },
            extensions={
                "target": url.target.encode(),
                "sni_hostname": url.host,
                "timeout": httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)).as_dict(),
            },
        )

    async def _body(self, response: httpx.Response, limit: int) -> bytes:
        """Read the body, up to the limit, whatever length the response declares."""
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise MediaError("The server of a file compresses its answer, which it was asked not to.")
        too_large = InvalidMedia(f"A file has more than {limit} bytes.")
        if int(response.headers.get("content-length", 0)) > limit:
            raise too_large
        size = 0
        chunks: list[bytes] = []
        until = asyncio.get_running_loop().time() + SLOW_SECONDS
        try:
            async with asyncio.timeout_at(until) as pace:
                async for chunk in response.aiter_raw():
                    size += len(chunk)
                    if size > limit:
                        raise too_large
                    chunks.append(chunk)
                    pace.reschedule(until + size / MIN_RATE)
        except TimeoutError as error:
            raise MediaTimeout(f"A file comes at less than {MIN_RATE} bytes a second.") from error
        return b"".join(chunks)


async def _look_up(host: str, port: int) -> list[str]:
    found = await NAMES.run(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return [str(entry[4][0]) for entry in found]
