"""The one error envelope, for every route and status."""

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """OpenAI's error object. `param` names the field at fault; `code` is for programs, `message` for people."""

    message: str
    """What is wrong, for people."""
    type: str
    """Kind of error: `invalid_request_error`, `not_found_error`, `rate_limit_error`, `server_error` and so on."""
    param: str | None = None
    """Path of the field at fault, as in `messages.0.content`."""
    code: str | None = None
    """What is wrong, for programs, as in `context_length_exceeded`."""


class MissingPart(BaseModel):
    """What a replica lacks. `name` is for programs, `reason` for people.

    Names: engine, prefill_peers, replicas, kv_events, canary, event_loop, draining.
    """

    name: str
    reason: str


class NotReadyBody(ErrorBody):
    """The error of a replica that is not ready."""

    missing: list[MissingPart]


class NotReadyEnvelope(BaseModel):
    """What readiness answers with 503."""

    error: NotReadyBody


class ErrorEnvelope(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody
