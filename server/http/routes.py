"""Paths of requests: the routes that they name, and messages for unknown paths and wrong methods."""

from difflib import get_close_matches
from http import HTTPStatus

from fastapi import Request
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.types import Scope

from multimodal.errors import shown
from routers.page import CHAT, DOCS, STATIC

INTERNAL = frozenset({"/prefill", "/encode", "/reset_prefix_cache", "/start_profile", "/stop_profile"})
"""Routes for replicas and operators, never for outside clients."""
ADMIN = frozenset({"/sleep", "/wake_up", "/is_sleeping", "/release_memory", "/resume_memory"})
"""Routes for operators, with ADMIN_KEY."""
_LACKING = frozenset(
    {"assistants", "batches", "chatkit", "containers", "conversations", "embeddings", "engines", "evals"}
    | {"files", "fine-tunes", "fine_tuning", "moderations", "organization", "realtime"}
    | {"threads", "uploads", "vector_stores"}
)
"""First segments of OpenAI's routes that this server lacks."""
_OF_PICTURES = frozenset({"images", "videos"})
_OF_TEXT = frozenset({"chat", "completions", "messages", "responses", "tokenize", "detokenize"})
"""First segments of routes that depend on what the model makes."""
_MESSAGES = "/v1/messages/"
_MOST_CHARACTERS = 100
"""Length from which a path is not compared with the routes."""
_SIMILAR = 0.75
"""Ratio of equal characters from which a path is taken for a mistyped route."""


def route_path(scope: Scope) -> str:
    """Return the path that routes are matched with: without the prefix of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path


def opens_page(path: str) -> bool:
    """Return whether a browser opens this path before it has a key: a page or one of its files."""
    return path in (CHAT, DOCS) or path.startswith(STATIC)


def is_anthropic(scope: Scope) -> bool:
    """Return whether a path belongs to Anthropic's API, whose errors have another envelope."""
    return f"{route_path(scope)}/".startswith(_MESSAGES)


def explained(error: HTTPException, request: Request) -> HTTPException:
    """Return a 404 or 405 for a request without a route with a more helpful message, and other errors unchanged."""
    path = route_path(request.scope)
    if error.detail != HTTPStatus(error.status_code).phrase:
        return error
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and error.headers and "Allow" in error.headers:
        message = f"{shown(path)} takes {error.headers['Allow']}, not {shown(request.method)}."
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message = _unknown(path, request)
    else:
        return error
    return HTTPException(error.status_code, message, error.headers)


def _unknown(path: str, request: Request) -> str:
    """Return the message for an unknown path."""
    paths = (str(context.path) for context in iter_route_contexts(request.app.routes))
    known = {_core(path): path for path in paths if "{" not in path and path not in INTERNAL | ADMIN}
    if path in ADMIN:
        return f"There is no route {path} here: it needs ADMIN_KEY, and a role with an engine."
    core = _core(path)
    first = core.partition("/")[0]
    if first in _OF_PICTURES and "models" in known and f"{first}/generations" not in known:
        return f"The model of this server makes text: there is no /v1/{shown(core)}."
    if first in _OF_TEXT and "images/generations" in known:
        return f"The model of this server makes pictures or videos: there is no /v1/{shown(core)}."
    if first in _LACKING or core == "audio/speech":
        return f"This server does not support OpenAI's /v1/{shown(core)}."
    if core.startswith("chat/completions/"):
        return "This server does not support OpenAI's stored chat completions."
    if not core:
        entries = " and ".join(known[name] for name in ("docs", "models") if name in known)
        page = " PAGE=true serves a page to chat here." if path == "/" and "chat/completions" in known else ""
        return f"There is no route {shown(path)}" + (f"; see {entries}." if entries else ".") + page
    meant = known.get(core) or next((known[near] for near in get_close_matches(core, known, 1, _SIMILAR)), None)
    return f"There is no route {shown(path)}" + (f"; did you mean {meant}?" if meant else ".")


def _core(path: str) -> str:
    """Return a path without /v1, surrounding slashes and capitals, which clients forget or repeat."""
    core = path[:_MOST_CHARACTERS].lower().strip("/")
    while core == "v1" or core.startswith("v1/"):
        core = core[3:].strip("/")
    return core
