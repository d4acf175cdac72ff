"""Bodies of multipart/form-data: fields and files, read within the limits of every body, and parsed as a wire type."""

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from engine.kit.work import NATIVE
from multimodal.errors import RequestError
from routers.body import INLINE_BYTES, read_body, refuse_compressed
from routers.state import state_of

M = TypeVar("M", bound=BaseModel)

_MAX_PARTS = 128
_MAX_HEAD = 8 << 10
_MAX_FIELD = 1 << 20
"""Bytes of a field that is no file."""
_PARAMETER = re.compile(r';\s*+([^\s=;"]++)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^";]*+))', re.DOTALL)
"""A parameter of a header. Finding all of them takes time linear in the header's length, because strangers write it."""
_ESCAPED = re.compile(r'\\(["\\])')


class Form(NamedTuple):
    """The fields and files of a form, by name and in order. A name may end with [] where several values are allowed.
    Names and types of files are not kept.
    """

    fields: dict[str, list[str]]
    files: dict[str, list[memoryview]]

    def parsed(self, model: type[M]) -> M:
        """Return the fields as a `model`, whose values are parsed from texts. Raises RequestError for a repeated field,
        and RequestValidationError.
        """
        for name, values in self.fields.items():
            if len(values) > 1:
                raise RequestError(f"'{name[:64]}' comes {len(values)} times.", name[:64])
        given = {name: values[0] for name, values in self.fields.items()}
        try:
            return model.model_validate_strings(given, strict=False)
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False, include_input=False), body=given) from None

    def file(self, name: str) -> memoryview | None:
        """Return the one file of a name, None if there is none. Raises RequestError if there are several, or a text."""
        found = [*self.files.get(name, ()), *self.files.get(f"{name}[]", ())]
        if len(found) > 1:
            raise RequestError(f"'{name}' may be one file; there are {len(found)}.", name)
        if name in self.fields:
            raise RequestError(f"'{name}' must be a file.", name)
        return found[0] if found else None


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def read_form(request: Request) -> Form:
    """Read a form. Raises RequestError if it is malformed, and HTTPException 408, 413 or 415."""
    if not is_form(request):
        raise HTTPException(415, "The body must be multipart/form-data.", {"accept": "multipart/form-data"})
    refuse_compressed(request)
    boundary = _parameters(request.headers["content-type"]).get("boundary", "")
    raw = await read_body(request, state_of(request)["http"])
    if not 0 < len(boundary) <= 256:
        raise RequestError("The header Content-Type names no boundary.")
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    return _split(raw, delimiter) if len(raw) <= INLINE_BYTES else await NATIVE.run(lambda: _split(raw, delimiter))


def _split(raw: bytes, delimiter: bytes) -> Form:
    form = Form({}, {})
    view = memoryview(raw)
    if raw.startswith(delimiter[2:]):
        at = len(delimiter) - 2
    elif (found := raw.find(delimiter)) >= 0:
        at = found + len(delimiter)
    else:
        raise _malformed("it has no part")
    for _ in range(_MAX_PARTS + 1):  # the last turn is for the end
        if raw.startswith(b"--", at):
            return form
        head_end = raw.find(b"\r\n\r\n", at, at + _MAX_HEAD)
        start = head_end + 4
        end = raw.find(delimiter, head_end + 2) if head_end >= 0 else -1
        if end < 0:
            raise _malformed("it breaks off, or its boundary is another")
        _add(form, _head(raw[at:head_end]), view[start : max(start, end)])
        at = end + len(delimiter)
    raise _malformed(f"it has more than {_MAX_PARTS} parts")


def _add(form: Form, head: Mapping[str, str], data: memoryview) -> None:
    name = head.get("name", "")
    if not name:
        raise _malformed("a part has no name")
    if "filename" in head:
        form.files.setdefault(name, []).append(data)
        return
    if len(data) > _MAX_FIELD:
        raise HTTPException(413, f"The field '{name[:64]}' has more than {_MAX_FIELD} bytes.")
    try:
        form.fields.setdefault(name, []).append(str(data, "utf-8"))
    except UnicodeDecodeError:
        raise RequestError(f"'{name[:64]}' must be UTF-8.", name[:64]) from None


def _head(raw: bytes) -> Mapping[str, str]:
    """Return the parameters of a part's Content-Disposition."""
    for line in raw.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            return _parameters(value)
    return {}


def _parameters(header: str) -> dict[str, str]:
    """Return a header's parameters by name, in lower case and without the * of those in another encoding."""
    return {
        name.lower().rstrip("*"): plain.strip() if quoted is None else _ESCAPED.sub(r"\1", quoted)
        for name, quoted, plain in (found.groups() for found in _PARAMETER.finditer(header))
    }


def _malformed(why: str) -> RequestError:
    return RequestError(f"The form cannot be read: {why}.", None, "malformed_form")
