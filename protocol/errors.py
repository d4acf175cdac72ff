"""The one error envelope, for every route and status."""

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """OpenAI's error object. `param` names the field at fault; `code` is for programs, `message` for people."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class MissingPart(BaseModel):
    """A condition of readiness that is not met. `name` is for programs, `reason` for people.

    Names: engine, prefill_peers, replicas, kv_events, canary, event_loop, draining.
    """

    name: str
    reason: str


class NotReadyBody(ErrorBody):
    """The error of a replica that is not ready."""

    missing: list[MissingPart]


class NotReadyEnvelope(BaseModel):
    """Body of the readiness route's 503."""

    error: NotReadyBody


class ErrorEnvelope(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody
