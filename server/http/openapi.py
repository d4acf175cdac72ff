"""The OpenAPI document of this server."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from engine.types import EngineInfo
from routers import messages, tokenize, transcriptions
from routers.batches import routes as batches
from routers.endpoint import OPENAI
from routers.endpoints import ENDPOINTS
from routers.responses import routes as responses
from routers.state import state_of
from routers.visual import images, videos
from server.compose.model import served_name
from server.http.middleware import LIVENESS, PROBES
from server.settings import Settings

_BODIES: tuple[type[BaseModel], ...] = (
    *(endpoint.body for endpoint in ENDPOINTS),
    *messages.BODIES,
    *batches.BODIES,
    *responses.BODIES,
    *tokenize.BODIES,
    *transcriptions.BODIES,
    *images.BODIES,
    *videos.BODIES,
)
_REFERENCE = "#/components/schemas/{model}"
_DESCRIPTION = """\
An OpenAI-compatible server of one model. OpenAI's SDKs work with `base_url` set to `/v1` here, Anthropic's with `/`.

**Streams.** With `"stream": true` the answer is `text/event-stream`: each event is a line `data: ` with one JSON chunk,
and `data: [DONE]` ends the stream. A failure after the first chunk is an event with an error in place of `[DONE]`.
Lines that begin with `:` keep the connection alive. `/v1/messages` streams as Anthropic's API does.

**Errors** of all routes are `{"error": {"message", "type", "param", "code"}}`; those below `/v1/messages` have
Anthropic's envelope. The header `x-should-retry` says whether the same request may succeed later, and `retry-after`
after how many seconds.

**Fields** that are marked as deprecated and `x-unsupported` are OpenAI's or other servers': values other than those
listed are refused. Unknown fields are ignored, or refused, as the server's settings say."""
_SECURITY = {
    "type": "http",
    "scheme": "bearer",
    "description": "One of the server's API keys. A server without keys is open to all.",
}


def install(app: FastAPI, settings: Settings) -> None:
    """Serve the document at /openapi.json. It is made when it is first asked for."""
    made: dict[EngineInfo | None, dict[str, Any]] = {}
    lock = asyncio.Lock()

    async def openapi(request: Request) -> Response:
        engine = state_of(request)["replica"].engine
        info = engine.info if engine is not None and engine.healthy else None
        async with lock:
            if info not in made:
                made.clear()
                made[info] = await asyncio.to_thread(_document, app, settings, info)
            document = made[info]
        root: str = request.scope.get("root_path", "").rstrip("/")
        return JSONResponse(document | ({"servers": [{"url": root}]} if root else {}))

    app.description = _DESCRIPTION
    app.add_api_route("/openapi.json", openapi, include_in_schema=False)


def _document(app: FastAPI, settings: Settings, info: EngineInfo | None) -> dict[str, Any]:
    """Return the document, with the bounds that the engine sets if it is known."""
    from protocol import chunks  # noqa: PLC0415 - only documents need these, and a server starts without them
    from server.http import schemas  # noqa: PLC0415

    app.openapi_schema = None  # it is changed below
    document = app.openapi()
    named: dict[str, type[BaseModel]] = {endpoint.chunk: getattr(chunks, endpoint.chunk) for endpoint in ENDPOINTS}
    sent: tuple[type[BaseModel], ...] = (*named.values(), *transcriptions.EVENTS, *images.EVENTS)
    _, definitions = models_json_schema(
        [*((body, "validation") for body in _BODIES), *((model, "serialization") for model in sent)],
        ref_template=_REFERENCE,
    )
    components = document["components"]
    components["schemas"].update(definitions["$defs"])
    schemas.complete(components["schemas"], settings, served_name(settings), info)
    components["securitySchemes"] = {"bearer": _SECURITY}
    document["security"] = [{"bearer": []}] if settings.api_keys else [{"bearer": []}, {}]
    for probe in PROBES & document["paths"].keys() if settings.open_probes else {LIVENESS}:
        document["paths"][probe]["get"]["security"] = []
    for endpoint in ENDPOINTS:
        if (path := document["paths"].get(endpoint.path)) is not None:
            choices = [{"$ref": _REFERENCE.format(model=name)} for name in (endpoint.chunk, endpoint.error.__name__)]
            content = path["post"]["responses"]["200"]["content"]
            content["text/event-stream"] = {"schema": {"anyOf": choices, "description": endpoint.framing.described}}
    streams: list[tuple[str, tuple[type[BaseModel], ...], str]] = [
        (transcriptions.PATHS[0], transcriptions.EVENTS, OPENAI.described),
        *((path, images.EVENTS, images.FRAMING.described) for path in images.PATHS),
    ]
    for place, events, described in streams:
        if (path := document["paths"].get(place)) is not None:
            names = (*(event.__name__ for event in events), "ErrorEnvelope")
            choices = [{"$ref": _REFERENCE.format(model=name)} for name in names]
            content = path["post"]["responses"]["200"]["content"]
            content["text/event-stream"] = {"schema": {"anyOf": choices, "description": described}}
    return document
