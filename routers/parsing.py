"""JSON to a model from the raw bytes, never long at a time: images are cut out first, since parsing copies them."""

import asyncio
import contextlib
import re
import secrets
from typing import TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

M = TypeVar("M", bound=BaseModel)

_MAX_VALUES = 5 << 18
"""Room for a prompt of a million token ids. Parsing more would hold up every other request for seconds."""
_LONG = 1 << 16
"""Bytes from which a data URL is cut out."""
_MAX_LOOKS = 1 << 10
"""Strings that are checked for a data URL; further ones are parsed with the rest."""
_KEY_BYTES = 64
_IMAGE = re.compile(rb'"(?:image_url|url)"\s*:\s*\Z')
_MAX_ERRORS = 1000
"""Above this number errors are counted and not listed."""


class CutUrls:
    """The data URLs that were cut out of one body; its validation puts them back."""

    def __init__(self) -> None:
        self._mark = f"data:cut-{secrets.token_hex(16)}-"
        self._urls: dict[str, str] = {}
        self._restored: set[str] = set()

    def cut(self, url: str) -> str:
        """Return what stands in the place of `url`; it needs no escapes in JSON."""
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


async def parsed(model: type[M], raw: bytes) -> M:
    """Parse a body as a `model`. Raises RequestValidationError."""
    short, urls = await _without_images(raw)
    found = _validated(model, short, urls)
    return found if urls.whole else _validated(model, raw, CutUrls())


def _validated(model: type[M], raw: bytes, urls: CutUrls) -> M:
    _refuse_many_values(raw)
    _refuse_non_finite(raw)
    try:
        return model.model_validate_json(raw, context=urls.restore)
    except ValidationError as error:
        raise _invalid(error, raw) from None


async def _without_images(raw: bytes) -> tuple[bytes, CutUrls]:
    """Return a body without the long data URLs of its images, and these.

    Each takes a millisecond, and the event loop runs after it.
    """
    urls = CutUrls()
    kept: list[bytes] = []
    done = start = 0
    for _ in range(_MAX_LOOKS if len(raw) > _LONG else 0):
        if (start := raw.find(b'"data:', start)) < 0:
            break
        end = raw.find(b'"', start + 1)
        if end - start > _LONG and _IMAGE.search(raw, max(0, start - _KEY_BYTES), start):
            with contextlib.suppress(UnicodeDecodeError):
                url = str(memoryview(raw)[start + 1 : end], "ascii")
                if "\\" in url:
                    url = url.replace("\\/", "/")
                if "\\" not in url:
                    kept += [raw[done : start + 1], urls.cut(url).encode()]
                    done = end
            await asyncio.sleep(0)
        start = max(end, start + 1)
    return b"".join([*kept, raw[done:]]), urls


def _refuse_many_values(raw: bytes) -> None:
    """Refuse by punctuation, which is quick to count: a text with so much of it exceeds any context, too."""
    if len(raw) > _MAX_VALUES and sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        raise _one_error("too_many", f"The body has more than {_MAX_VALUES} values")


def _refuse_non_finite(raw: bytes) -> None:
    """Refuse NaN and Infinity, which are not JSON: Pydantic accepts them in a field of any type."""
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
