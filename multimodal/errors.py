"""Errors between the wire and the engine.

InvalidRequest               the request is wrong: the user's mistake (`engine/errors.py`)
└── RequestError             it is found wrong before the engine sees it
    ├── ModelNotFound        it names a model that is not served
    └── MediaError           a file that it refers to cannot be used
        ├── MediaTimeout     it did not arrive in time
        ├── InvalidMedia     it exceeds the limits, or is broken
        └── UnsupportedMedia its format is not supported
DeadlineExceeded             the request took longer than it may
"""

from typing import Self

from engine.errors import InvalidRequest
from engine.media import MediaKind

MAX_MESSAGE = 300
_MAX_NAME = 64


def shown(name: str) -> str:
    """Return a client's text as messages may repeat it: printable and short."""
    return "".join(c if c.isprintable() else "?" for c in name[:_MAX_NAME]) + "…" * (len(name) > _MAX_NAME)


class RequestError(InvalidRequest):
    """The request is wrong. Messages are bounded and never repeat input at length."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…", param, code)


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    def __init__(self, asked: str, served: str) -> None:
        message = f"The model '{shown(asked)}' does not exist; this server serves '{shown(served)}'."
        super().__init__(message, "model", "model_not_found")


class MediaError(RequestError):
    """A file that the request refers to cannot be used. Messages name no address and repeat nothing of the file."""

    code = "invalid_image_url"

    def __init__(self, message: str, param: str | None = "messages", code: str | None = None) -> None:
        super().__init__(message, param, code)

    def about(self, kind: MediaKind, param: str) -> Self:
        """Return the same error for a file of this kind, which `param` names."""
        found = self.at(param)
        found.code = self.code.replace("image", kind)
        return found


class MediaTimeout(MediaError):
    """The file did not arrive in time."""


class InvalidMedia(MediaError):
    """The file exceeds the limits, or is broken."""

    code = "invalid_image"


class UnsupportedMedia(MediaError):
    """The file's format is not supported."""

    code = "invalid_image_format"


class DeadlineExceeded(Exception):
    """The whole request took longer than the server allows."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request took longer than the {seconds:g} seconds that it may.")
