"""The OpenAPI document, with the schemas of the bodies that `routers/body.py` parses, and its page."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from routers import tokenize
from routers.endpoints import ENDPOINTS

_BODIES: tuple[type[BaseModel], ...] = (*(endpoint.body for endpoint in ENDPOINTS), *tokenize.BODIES)


def install(app: FastAPI) -> None:
    """Serve the document with the bodies' schemas, and /docs."""
    make_document = app.openapi

    def openapi() -> dict[str, Any]:
        document = make_document()
        _, definitions = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template="#/components/schemas/{model}"
        )
        document["components"]["schemas"].update(definitions["$defs"])
        return document

    async def docs(request: Request) -> HTMLResponse:
        return get_swagger_ui_html(openapi_url=f"{request.scope.get('root_path', '')}/openapi.json", title=app.title)

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it
    app.add_api_route("/docs", docs, include_in_schema=False)
