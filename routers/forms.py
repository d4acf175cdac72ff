"""Bodies of multipart/form-data: fields and files, read within the limits of every body, and parsed as a wire type."""

from collections.abc import Mapping
from email.message import Message
from typing import Any, NamedTuple, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from engine.kit.work import NATIVE
from multimodal.errors import RequestError
from routers.body import INLINE_BYTES, read_body
from routers.state import state_of

M = TypeVar("M", bound=BaseModel)

_MAX_PARTS = 128
_MAX_HEAD = 8 << 10
_MAX_FIELD = 1 << 20
"""Bytes of a field that is no file."""


class FormFile(NamedTuple):
    """A file of a form. What it says of itself is not to be trusted."""

    name: str
    data: memoryview


class Form(NamedTuple):
    """What a form has, by name and in order. A name may end with [] where there may be several."""

    fields: dict[str, list[str]]
    files: dict[str, list[FormFile]]

    def parsed(self, model: type[M]) -> M:
        """Return the fields as a `model`, whose types are made of texts. Raises RequestError for a field that comes
        twice, and RequestValidationError.
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
        return found[0].data if found else None


def is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def read_form(request: Request) -> Form:
    """Read a form. Raises RequestError if it is malformed, and HTTPException 408, 413 or 415."""
    if not is_form(request):
        raise HTTPException(415, "The body must be multipart/form-data.", {"accept": "multipart/form-data"})
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
    for _ in range(_MAX_PARTS):
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
        form.files.setdefault(name, []).append(FormFile(head["filename"], data))
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
    message = Message()
    message["content-type"] = header.replace("\r", " ").replace("\n", " ").strip()
    found: list[Any] = message.get_params(failobj=[], unquote=True)
    return {str(name).lower(): value if isinstance(value, str) else str(value[2]) for name, value in found[1:]}


def _malformed(why: str) -> RequestError:
    return RequestError(f"The form cannot be read: {why}.", None, "malformed_form")
