"""Errors from below the engine seam.

    EngineError
    ├── InvalidRequest        the request itself is wrong: the user's mistake, final
    │   ├── ContextOverflow   prompt and output do not fit the context or the KV cache
    │   └── RequestError …    found before the engine sees the request (`multimodal/errors.py`, `routers/errors.py`)
    ├── EngineUnavailable     try again later, here or on another replica
    │   ├── EngineNotReady    starting, restarting or closing
    │   │   └── EngineAsleep  asleep, or about to be, until it is woken
    │   ├── EngineDied        the engine was lost while the request ran
    │   ├── EmbeddingsLost    those of an image cannot be read where they are: encode it again
    │   ├── QueueFull         too many requests wait already
    │   └── QueueTimeout      the request waited too long for the engine
    ├── EngineWoken           a sleep was cancelled: the engine was woken before its last request had ended
    ├── NotSupported          this backend, or how it was started, cannot do what was asked
    └── EngineFailure         one request failed inside the engine: our bug or the hardware's

Backends translate foreign exceptions into these, once, where the foreign library is called; `server/http/errors.py`
renders them, once.
"""

from typing import Self


class EngineError(Exception):
    """Base of every error that crosses the engine seam."""


class InvalidRequest(EngineError):
    """The request is refused and always will be.

    `param` names the field at fault: below the engine seam a part of `engine/types`, above it a field as the client
    spelled it. `code` is for programs.
    """

    code: str | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code

    def at(self, param: str | None) -> Self:
        """Return the same error for another field."""
        return type(self)(str(self), param, self.code)


class ContextOverflow(InvalidRequest):
    """The prompt, or the prompt and the tokens asked for, exceed the context length or the whole KV cache."""

    code = "context_length_exceeded"


class EngineUnavailable(EngineError):
    """The engine cannot serve the request now; another attempt may succeed."""


class EngineNotReady(EngineUnavailable):
    """The engine is starting, restarting or closing."""


class EngineAsleep(EngineNotReady):
    """The engine has released its memory, or is about to."""


class EngineDied(EngineUnavailable):
    """The engine process was lost while this request ran."""


class EmbeddingsLost(EngineUnavailable):
    """Embeddings of the prompt's media could not be read where they were left."""


class QueueFull(EngineUnavailable):
    """The queue of waiting requests is full."""


class QueueTimeout(EngineUnavailable):
    """The request waited for the engine longer than the limit."""


class EngineWoken(EngineError):
    """A sleep was cancelled: the engine was woken before its last request had ended."""


class NotSupported(EngineError):
    """The backend does not support the operation, or was started without support for it."""


class EngineFailure(EngineError):
    """One request failed inside the engine; the others go on."""
