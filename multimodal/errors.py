"""What can go wrong between the wire and the engine.

RequestError                 the request is wrong: the user's mistake
├── ModelNotFound            it names a model that is not served
├── ContextLengthExceeded    prompt and output exceed the context
└── MediaError               a file that it refers to is not to be had
    ├── MediaTimeout         it did not come in time
    ├── InvalidMedia         it is beyond the limits, or broken
    └── UnsupportedMedia     its format is none that is taken
DeadlineExceeded             the request took longer than it may
"""

from typing import Self

MAX_MESSAGE = 300


class RequestError(Exception):
    """`param` names the field at fault, `code` is for programs. Messages are bounded and never echo input at length."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…")
        self.param = param
        self.code = code


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    def __init__(self, served: str) -> None:
        super().__init__(f"The model does not exist; this server serves {served!r}.", "model", "model_not_found")


class ContextLengthExceeded(RequestError):
    """The prompt, or the prompt and the tokens asked for, exceed the context length."""

    def __init__(self, prompt: int, output: int, context: int, param: str) -> None:
        message = (
            f"This model's context is {context} tokens; the request has {prompt} prompt tokens and asks for {output} more, "
            f"{prompt + output} in all."
        )
        super().__init__(message, param, "context_length_exceeded")


class MediaError(RequestError):
    """A file that the request refers to is not to be had. Messages name no address and repeat nothing of the file."""

    default_code = "invalid_image_url"

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message, param, self.default_code)

    def at(self, param: str) -> Self:
        """The same of another field: requests that wait for one file each have it at a place of their own."""
        return type(self)(str(self), param)


class MediaTimeout(MediaError):
    """The file did not come in time."""


class InvalidMedia(MediaError):
    """The file is beyond the limits, or broken."""

    default_code = "invalid_image"


class UnsupportedMedia(MediaError):
    """The file's format is none that is taken."""

    default_code = "invalid_image_format"


class DeadlineExceeded(Exception):
    """The whole request took longer than the server allows."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request took longer than the {seconds:g} seconds that it may.")
