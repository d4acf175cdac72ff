"""The one error envelope, for every route and status."""

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """OpenAI's error object. `param` names the field at fault; `code` is for programs, `message` for people."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody
