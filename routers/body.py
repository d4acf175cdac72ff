"""Reading a body, mostly a JSON one: its type, size and time limited, validated from the raw bytes."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from routers.state import HttpOptions, state_of

M = TypeVar("M", bound=BaseModel)

_MAX_VALUES = 5 << 18
"""Room for a prompt of a million token ids. Parsing more would hold up every other request for seconds."""
_HEAR_OUT_SECONDS, _HEAR_OUT_BYTES = 0.5, 64 << 20
_MAX_ERRORS = 1000
"""Beyond so many, errors are counted and not listed."""


def json_body(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """A dependency that parses the body as a `model`. Raises RequestValidationError, or HTTPException 408, 413 or 415."""

    async def parse(request: Request) -> M:
        _check_headers(request)
        raw = await read_body(request, state_of(request)["http"])
        _refuse_many_values(raw)
        _refuse_non_finite(raw)
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            raise _invalid(error, raw) from None

    return parse


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """What `openapi_extra` says of a body that `json_body` reads; `server/openapi.py` adds the schema."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not (content_type.startswith("application/") and content_type.endswith("+json")):
        raise HTTPException(415, "The body must be application/json.", {"accept": "application/json"})
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Compressed bodies are not accepted.", {"accept-encoding": "identity"})


async def read_body(request: Request, options: HttpOptions) -> bytes:
    """The bytes of a body. Raises HTTPException 408 or 413."""
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
        raise HTTPException(408, f"The body did not arrive within {options.body_timeout:g} s.", {"connection": "close"}) from None
    return b"".join(chunks)


async def _hear_out(request: Request) -> None:
    """Drop what a client or proxy is still sending, for a moment: the end of a connection with unread bytes would overtake the answer.
    One that waits to be asked for its body is not asked."""
    if "expect" in request.headers:
        return
    size = 0
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_HEAR_OUT_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > _HEAR_OUT_BYTES:
                    return


async def _too_large(request: Request, limit: int) -> HTTPException:
    await _hear_out(request)
    return HTTPException(413, f"The body exceeds {limit} bytes.", {"connection": "close"})


def _refuse_many_values(raw: bytes) -> None:
    """By punctuation, which is quick to count: a text that has so much of it is longer than any context, too."""
    if len(raw) > _MAX_VALUES and sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        raise _one_error("too_many", f"The body has more than {_MAX_VALUES} values")


def _refuse_non_finite(raw: bytes) -> None:
    """Pydantic takes the JavaScript numbers, which are no JSON, where a field may be anything."""
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            from_json(raw, allow_inf_nan=False)
        except ValueError as error:
            raise _one_error("json_invalid", f"Invalid JSON: {error}") from None


def _invalid(error: ValidationError, raw: bytes) -> RequestValidationError:
    if error.error_count() > _MAX_ERRORS:
        return _one_error("too_many", f"The body has {error.error_count()} invalid values")
    errors = error.errors(include_url=False, include_input=False)
    invalid_json = errors[0]["type"] == "json_invalid"
    return RequestValidationError(errors, body=None if invalid_json else from_json(raw))


def _one_error(kind: str, message: str) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": (), "msg": message}])
