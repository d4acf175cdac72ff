"""What can go wrong below the engine seam.

    EngineError
    ├── InvalidRequest        the request itself is wrong: the user's mistake, final
    │   └── ContextOverflow   prompt and output do not fit the context or the KV cache
    ├── EngineUnavailable     try again later, here or on another replica
    │   ├── EngineNotReady    starting, restarting or closing
    │   ├── EngineDied        the engine was lost while the request ran
    │   ├── QueueFull         too many requests wait already
    │   └── QueueTimeout      the request waited too long for its turn
    └── EngineFailure         one request failed inside the engine: our bug or the hardware's

Backends translate foreign exceptions into these, once, where the foreign library is called; `server/http/errors.py` renders them, once.
"""


class EngineError(Exception):
    """Base of every error that crosses the engine seam."""


class InvalidRequest(EngineError):
    """The engine refuses this request and always will; `param` names the part of `engine/types` at fault, where one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextOverflow(InvalidRequest):
    """The prompt, or the prompt and the tokens asked for, exceed the context length or the whole KV cache."""


class EngineUnavailable(EngineError):
    """Nothing is wrong with the request: another attempt may succeed."""


class EngineNotReady(EngineUnavailable):
    """The engine is starting, restarting or closing."""


class EngineDied(EngineUnavailable):
    """The engine process was lost while this request ran."""


class QueueFull(EngineUnavailable):
    """As many requests wait for the engine as may."""


class QueueTimeout(EngineUnavailable):
    """The request waited for the engine as long as it may."""


class EngineFailure(EngineError):
    """One request failed inside the engine; the others go on."""
