"""The one table from exceptions to answers: status, type, code and headers. All errors are rendered here."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from engine import trace
from engine.errors import (
    ContextOverflow,
    EmbeddingsLost,
    EngineAsleep,
    EngineDied,
    EngineError,
    EngineFailure,
    EngineNotReady,
    EngineUnavailable,
    EngineWoken,
    InvalidRequest,
    NotSupported,
    QueueFull,
    QueueTimeout,
)
from engine.kit.logs import printable
from multimodal.errors import DeadlineExceeded, MediaTimeout, ModelNotFound, UnsupportedMedia
from protocol.errors import ErrorBody, ErrorEnvelope, MissingPart, NotReadyBody, NotReadyEnvelope
from protocol.messages import MessagesError, MessagesErrorEnvelope
from routers.errors import NotFound, NotReady, ReplicasDiffer, WrongReplica
from server.http.routes import explained, is_anthropic
from server.http.validation import sentences

log = logging.getLogger(__name__)

_MAX_ERRORS = 10
_MAX_CHARACTERS = 200
_MOST = (_MAX_CHARACTERS + 2) * _MAX_ERRORS


@dataclass(frozen=True)
class Rule:
    """The answer to a kind of exception; `message` replaces its own text, `retry` becomes x-should-retry."""

    status: int
    type: str
    code: str | None = None
    retry_after: int | None = None
    retry: bool | None = None
    message: str | None = None


_INTERNAL = Rule(500, "server_error", "internal_error", retry=False, message="The server failed on this request.")
_RULES: dict[type[Exception], Rule] = {
    RequestValidationError: Rule(400, "invalid_request_error"),
    ModelNotFound: Rule(404, "not_found_error"),
    NotFound: Rule(404, "not_found_error"),
    WrongReplica: Rule(404, "not_found_error", "wrong_replica"),
    ReplicasDiffer: Rule(409, "invalid_request_error", "replicas_differ"),
    MediaTimeout: Rule(408, "invalid_request_error", retry=False),
    UnsupportedMedia: Rule(415, "invalid_request_error"),
    DeadlineExceeded: Rule(504, "server_error", "deadline_exceeded", retry=False),
    InvalidRequest: Rule(400, "invalid_request_error"),
    EngineNotReady: Rule(503, "server_error", "not_ready", retry_after=2, retry=True),
    EngineAsleep: Rule(503, "server_error", "asleep", retry_after=2, retry=True),
    EngineWoken: Rule(409, "invalid_request_error", "woken", retry=False),
    NotSupported: Rule(501, "server_error", "not_supported", retry=False),
    EngineDied: Rule(503, "server_error", "engine_died", retry_after=2, retry=True),
    EmbeddingsLost: Rule(503, "server_error", "embeddings_lost", retry_after=2, retry=True),
    QueueFull: Rule(429, "rate_limit_error", "queue_full", retry_after=1, retry=True),
    QueueTimeout: Rule(503, "server_error", "queue_timeout", retry_after=2, retry=True),
    EngineUnavailable: Rule(503, "server_error", "unavailable", retry_after=2, retry=True),
    EngineFailure: Rule(500, "server_error", "engine_failure", retry=False),
    ClientDisconnect: Rule(
        499, "invalid_request_error", "client_disconnected", message="The client closed the connection."
    ),
    Exception: _INTERNAL,
}
_HTTP_RULES: dict[int, Rule] = {
    401: Rule(401, "authentication_error", "invalid_api_key"),
    403: Rule(403, "permission_error", "forbidden"),
    404: Rule(404, "not_found_error", "unknown_url"),
    405: Rule(405, "invalid_request_error", "method_not_allowed"),
    408: Rule(408, "invalid_request_error", "request_timeout"),
    413: Rule(413, "invalid_request_error", "request_too_large"),
    415: Rule(415, "invalid_request_error", "unsupported_media_type"),
    431: Rule(431, "invalid_request_error", "headers_too_large"),
}
_ANTHROPIC: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors; `invalid_request_error` for other mistakes of a client, else `api_error`."""


@dataclass(frozen=True)
class ErrorAnswer:
    """A rendered exception."""

    status: int
    body: bytes
    """The envelope of the request's API."""
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, media_type="application/json")


def render(error: Exception, scope: Scope | None = None) -> ErrorAnswer:
    """Return the answer to a request that failed with `error`; without `scope`, the request is unknown."""
    rule = _rule(error)
    if rule.status == 500:
        log.error("a request failed", exc_info=error)
    message, param = _describe(error)
    code = (error.code if isinstance(error, InvalidRequest) else None) or rule.code
    if (span := trace.current.get()) is not None:
        span.fail(code or rule.type, ours=rule.status >= 500)
    body = ErrorBody(message=printable(rule.message or message, _MOST), type=rule.type, param=param, code=code)
    envelope: BaseModel = ErrorEnvelope(error=body)
    if isinstance(error, NotReady):
        envelope = _not_ready(body, error)
    elif scope is not None and is_anthropic(scope):
        envelope = _anthropic(body, rule.status, error, scope["state"]["request_id"])
    return ErrorAnswer(rule.status, envelope.model_dump_json().encode(), _headers(rule, error))


def render_event(error: Exception, scope: Scope) -> bytes:
    """Return the envelope of an error that came after the headers."""
    return render(error, scope).body


def status_of(error: Exception) -> int:
    """Return the status of the answer to a request that failed with `error`."""
    return _rule(error).status


def install(app: FastAPI) -> None:
    """Answer every exception that a route raises by the table; `RequestMiddleware` answers the others."""
    for cls in (RequestValidationError, DeadlineExceeded, EngineError, HTTPException, ClientDisconnect):
        app.add_exception_handler(cls, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    known = explained(error, request) if isinstance(error, HTTPException) else error
    return render(known, request.scope).response()


def _anthropic(body: ErrorBody, status: int, error: Exception, request_id: str) -> MessagesErrorEnvelope:
    kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
    # Claude Code looks for these words, and makes the conversation shorter.
    said = f"prompt is too long: {body.message}" if isinstance(error, ContextOverflow) else body.message
    given = {"error_code": body.code, "param": body.param}
    details = {name: value for name, value in given.items() if value is not None}
    return MessagesErrorEnvelope(
        error=MessagesError(type=kind, message=said, details=details or None), request_id=request_id
    )


def _not_ready(body: ErrorBody, error: NotReady) -> NotReadyEnvelope:
    missing = [MissingPart(name=name, reason=printable(reason, _MOST)) for name, reason in error.missing]
    return NotReadyEnvelope(error=NotReadyBody(**body.model_dump(), missing=missing))


def _rule(error: Exception) -> Rule:
    if isinstance(error, HTTPException):
        return _http_rule(error)
    return next(_RULES[cls] for cls in type(error).__mro__ if cls in _RULES)


def _http_rule(error: HTTPException) -> Rule:
    default = Rule(error.status_code, "server_error" if error.status_code >= 500 else "invalid_request_error")
    return _HTTP_RULES.get(error.status_code, default)


def _headers(rule: Rule, error: Exception) -> dict[str, str]:
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"  # `HeadMiddleware`
    if rule.retry_after is not None:
        headers["retry-after"] = str(rule.retry_after)
    if rule.retry is not None:
        headers["x-should-retry"] = str(rule.retry).lower()
    return headers


def _describe(error: Exception) -> tuple[str, str | None]:
    """Return message and param. An exception whose text is not for clients has a message in its rule."""
    match error:
        case RequestValidationError():
            return _describe_validation(error.errors(), error.body)
        case HTTPException():
            return error.detail or HTTPStatus(error.status_code).phrase, None
        case InvalidRequest():
            return str(error), error.param
    message = str(error) or type(error).__name__
    return message[0].upper() + message[1:], None


def _describe_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str | None]:
    found = sentences(errors, body)[:_MAX_ERRORS]
    message = " ".join(printable(sentence, _MAX_CHARACTERS) for _, sentence in found)
    return message, printable(found[0][0], _MAX_CHARACTERS) or None
