"""Requests: their bodies read within limits and parsed, and their work cancelled once the client has left."""

import asyncio
import contextlib
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from engine.kit.work import NATIVE, PYTHON
from protocol.common import MAX_BODY_VALUES, MAX_TEXT_BYTES
from routers.state import HttpOptions, State, state_of

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_DRAIN_SECONDS = 0.5
_DRAIN_BYTES = 64 << 20
_MIB = 1 << 20
_LARGE = _MIB
"""Bytes from which a body is joined in a thread, which releases the GIL."""
INLINE_BYTES = 1 << 16
"""Bytes up to which a body is parsed and converted on the event loop, which takes at most about 20 ms."""
_LONG = 1 << 12
"""Bytes from which a data URL is cut out."""
_MAX_LOOKS = 1 << 10
"""Strings that are checked for an image; further ones are parsed with the rest."""
_KEY_BYTES = 64
_WEIGHTS = {b",": 1, b"[": 1, b":": 3, b"{": 11}
"""Weights of the marks of entries (such as token ids), fields and objects, by the time that parsing them takes."""
_IN_TEXT = re.compile(rb'(?:[^"\\]++|\\.)++', re.DOTALL)
_WINDOW = 1 << 16
"""Bytes that a regular expression may scan on the event loop."""
_IMAGE = re.compile(rb'"(?:image_url|video_url|audio_url|url)"\s*:\s*\Z')
_BASE64 = re.compile(rb'"data"\s*:\s*(?="(?:\\?/9j\\?/|\\?/\\?/|iVBORw0KGgo|R0lGOD|UklGR|ZkxhQ|T2dnU|SUQz))')
"""A field with a file in base64 that is not a data URL: JPEG, MP3, PNG, GIF, WebP or WAV, FLAC, Ogg, or ID3."""
_MAX_DIGITS = 400
"""Digits of a number; the time to parse one grows with their square."""
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_MAX_ERRORS = 1000
"""Above this number errors are counted and not listed."""


def json_body(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a dependency that parses the body as a `model`.

    It raises RequestValidationError, or HTTPException 408, 413 or 415.
    """

    async def parse(request: Request) -> M:
        _check_headers(request)
        options = state_of(request)["http"]
        raw = await read_body(request, options)
        work = parsed(model, raw, options.max_text_bytes, options.max_values)
        return await (work if len(raw) <= INLINE_BYTES else while_connected(request, work))

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
        message = "The body must be JSON: add the header 'Content-Type: application/json' (curl: -H)."
        raise HTTPException(415, message, {"accept": "application/json"})
    refuse_compressed(request)


def refuse_compressed(request: Request) -> None:
    """Raise HTTPException 415 for a body that is compressed."""
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
    state_of(request)["body_bytes"] = size
    return b"".join(chunks) if size < _LARGE else await NATIVE.run(lambda: b"".join(chunks))


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


class CutUrls:
    """The data URLs that were cut out of one body; its validation puts them back."""

    def __init__(self) -> None:
        self._mark = f"data:cut-{secrets.token_hex(16)}-"
        self._urls: dict[str, str] = {}
        self._restored: set[str] = set()

    def cut(self, url: str) -> str:
        """Return the text that replaces `url`; it needs no escapes in JSON."""
        mark = f"{self._mark}{len(self._urls)}"
        self._urls[mark] = url
        return mark

    def restore(self, text: str) -> str:
        """Return the URL that `text` stands for, or `text`."""
        if text not in self._urls:
            return text
        self._restored.add(text)
        return self._urls[text]

    @property
    def whole(self) -> bool:
        """Whether all URLs have been put back."""
        return len(self._restored) == len(self._urls)


async def parsed(
    model: type[M], raw: bytes, max_text_bytes: int = MAX_TEXT_BYTES, max_values: int = MAX_BODY_VALUES
) -> M:
    """Parse a body as a `model`. Raises RequestValidationError, or HTTPException 413."""
    urls = CutUrls()
    kept = await _without_images(raw, urls)
    if (size := sum(map(len, kept))) > max_text_bytes:
        found = math.ceil(10 * size / _MIB) / 10
        raise HTTPException(
            413, f"The body has {found:g} MiB of text; at most {max_text_bytes / _MIB:g} MiB are allowed (MAX_TEXT_MB)."
        )
    short = b"".join(kept)

    def work() -> M:
        _refuse_many_values(short, max_values)
        _refuse_long_numbers(short)
        found = _validated(model, short, urls)
        return found if urls.whole else _validated(model, raw, CutUrls())

    return work() if size <= INLINE_BYTES else await PYTHON.run(work)


def _validated(model: type[M], raw: bytes, urls: CutUrls) -> M:
    _refuse_non_finite(raw)
    try:
        return model.model_validate_json(raw, context=urls.restore)
    except ValidationError as error:
        raise _invalid(error, raw) from None


async def _without_images(raw: bytes, urls: CutUrls) -> list[bytes]:
    """Cut the long data URLs of images, and images in base64, out of a body, and return the rest.

    Each takes a millisecond, and the event loop runs after it.
    """
    kept: list[bytes] = []
    done = start = 0
    for _ in range(_MAX_LOOKS if len(raw) > _LONG else 0):
        if (start := raw.find(b'"data', start)) < 0:
            break
        field = _BASE64.match(raw, start)
        start = start if field is None else field.end()
        if field is None and raw[start + 5 : start + 6] != b":":
            start += 1
            continue
        end = raw.find(b'"', start + 1)
        if end - start > _LONG and (field or _IMAGE.search(raw, max(0, start - _KEY_BYTES), start)):
            with contextlib.suppress(UnicodeDecodeError):
                url = str(memoryview(raw)[start + 1 : end], "ascii")
                if "\\" in url:
                    url = url.replace("\\/", "/")
                if "\\" not in url:
                    kept += [raw[done : start + 1], urls.cut(url).encode()]
                    done = end
            await asyncio.sleep(0)
        start = max(end, start + 1)
    return [*kept, raw[done:]]


def _refuse_many_values(raw: bytes, most: int) -> None:
    """Refuse a body with too many values. Punctuation is quick to count; texts are skipped only if that changes the
    result."""
    count = 0
    for part in _outside_texts(raw) if _values(raw) > most else ():
        count += 1 + _values(part)
        if count > most:
            raise HTTPException(413, f"The body is too complex: it has more than {most} JSON values (MAX_BODY_VALUES).")


def _refuse_long_numbers(raw: bytes) -> None:
    """Refuse numbers that take long to parse. Texts are skipped only if that changes the result."""
    long = b"0" * (_MAX_DIGITS + 1)
    if long in raw.translate(_DIGITS) and any(long in part.translate(_DIGITS) for part in _outside_texts(raw)):
        message = f"a number has more than {_MAX_DIGITS} digits"
        raise _one_error("json_invalid", message, {"error": message})


def _outside_texts(raw: bytes) -> Iterator[bytes]:
    """Yield the parts of a body outside its texts, the last of which may be unterminated."""
    end = 0
    while (start := raw.find(b'"', end)) >= 0:
        yield raw[end:start]
        end = start + 1
        while end < len(raw) and raw[end] != ord('"'):
            inside = _IN_TEXT.match(raw, end, end + _WINDOW)
            if inside is None:
                return
            end = inside.end()
        end += 1
    yield raw[end:]


def _values(raw: bytes) -> int:
    return sum(weight * raw.count(mark) for mark, weight in _WEIGHTS.items())


def _refuse_non_finite(raw: bytes) -> None:
    """Refuse NaN and Infinity, which are not JSON: Pydantic accepts them in a field of any type."""
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            from_json(raw, allow_inf_nan=False)
        except ValueError as error:
            raise _one_error("json_invalid", str(error), {"error": str(error)}) from None


def _invalid(error: ValidationError, raw: bytes) -> RequestValidationError:
    if error.error_count() > _MAX_ERRORS:
        return _one_error("too_many", f"The body has {error.error_count()} invalid values")
    errors = error.errors(include_url=False, include_input=False)
    invalid_json = errors[0]["type"] == "json_invalid"
    return RequestValidationError(errors, body=None if invalid_json else from_json(raw))


def _one_error(kind: str, message: str, context: dict[str, str] | None = None) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": (), "msg": message, "ctx": context or {}}])


async def converted(state: State, convert: Callable[[], T]) -> T:
    """Return the result of `convert`, which reads the parsed body: off the event loop, if that was large."""
    return convert() if state.get("body_bytes", 0) <= INLINE_BYTES else await PYTHON.run(convert)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. When the client goes, cancel it and raise ClientDisconnect.

    The body must have been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task, gone))


async def disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    """Wait until the client has gone or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
