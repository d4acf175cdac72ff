"""The one error envelope, for every route and status."""

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    message: str
    """Description of the error, for people."""
    type: str
    """Kind of error: `invalid_request_error`, `not_found_error`, `rate_limit_error`, `server_error` and so on."""
    param: str | None = None
    """Path of the field at fault, as in `messages.0.content`."""
    code: str | None = None
    """Kind of error, for programs, such as `context_length_exceeded`."""


class MissingPart(BaseModel):
    """A condition of readiness that is not met."""

    name: str
    """Name of the part, for programs: engine, prefill_peers, replicas, kv_events, canary, event_loop, api_processes or
    draining."""
    reason: str
    """Description for people."""


class NotReadyBody(ErrorBody):
    """The error of a replica that is not ready."""

    missing: list[MissingPart]
    """All that is missing."""


class NotReadyEnvelope(BaseModel):
    """Body of the readiness route's 503."""

    error: NotReadyBody
    """The error."""


class ErrorEnvelope(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody
    """The error."""
