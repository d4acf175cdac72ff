"""Reading bodies, with limits on type, size and time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from routers.parsing import parsed
from routers.state import HttpOptions, state_of

M = TypeVar("M", bound=BaseModel)

_DRAIN_SECONDS = 0.5
_DRAIN_BYTES = 64 << 20
_LARGE = 1 << 20
"""Bytes from which a body is joined in a thread, which releases the GIL."""


def json_body(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a dependency that parses the body as a `model`.

    It raises RequestValidationError, or HTTPException 408, 413 or 415.
    """

    async def parse(request: Request) -> M:
        _check_headers(request)
        return await parsed(model, await read_body(request, state_of(request)["http"]))

    return parse


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route with `json_body`; `server/http/openapi.py` adds the schema."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        raise HTTPException(415, "The body must be application/json.", {"accept": "application/json"})
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Compressed bodies are not accepted.", {"accept-encoding": "identity"})


async def read_body(request: Request, options: HttpOptions) -> bytes:
    """Read a body. Raises HTTPException 408 or 413."""
    limit = options.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise await _too_large(request, limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(options.body_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise await _too_large(request, limit)
                chunks.append(chunk)
    except TimeoutError:
        raise HTTPException(
            408, f"The body did not arrive within {options.body_timeout:g} s.", {"connection": "close"}
        ) from None
    return b"".join(chunks) if size < _LARGE else await asyncio.to_thread(b"".join, chunks)


async def _drain_body(request: Request) -> None:
    """Read on briefly, so that the 413 arrives before unread bytes reset the connection.

    A client that waits for "100 Continue" sends nothing.
    """
    if "expect" in request.headers:
        return
    size = 0
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > _DRAIN_BYTES:
                    return


async def _too_large(request: Request, limit: int) -> HTTPException:
    await _drain_body(request)
    return HTTPException(413, f"The body exceeds {limit} bytes.", {"connection": "close"})
