"""Creation of the application: routers, middleware, error table, lifespan."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_fastapi_instrumentator.metrics import Info

from engine.process.child import SpareHost
from protocol.errors import ErrorEnvelope
from routers import operations, sleep
from routers.page import page_router
from server import __version__
from server.compose.model import served_name
from server.http import errors, openapi
from server.http.middleware import (
    ApiKeyMiddleware,
    GateMiddleware,
    HeadMiddleware,
    OriginMiddleware,
    RequestMiddleware,
    http_metrics,
    instrument,
)
from server.http.websocket import WebSocketRequest
from server.lifespan import make_lifespan
from server.metrics.page import ServerMetrics
from server.process.banner import on_terminal
from server.roles import role_of
from server.settings import Settings

if TYPE_CHECKING:
    from server.http.tracing import Tracing


def create_app(settings: Settings, metrics_folder: Path | None = None, spare: SpareHost | None = None) -> FastAPI:
    """Return the application of one API process; several share their metrics in `metrics_folder`. `spare` is a process
    for its engine."""
    server_metrics = ServerMetrics(served_name(settings), metrics_folder, settings.vllm_metrics)
    tracing = _tracing(settings, server_metrics)
    measure = http_metrics(server_metrics.registry)
    begin_message = partial(WebSocketRequest, measure, tracing.request if tracing is not None else None)
    app = FastAPI(
        title="Trellis",
        version=__version__,
        lifespan=make_lifespan(
            settings, server_metrics, begin_message, tracing.close if tracing is not None else None, spare
        ),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    role = role_of(settings)
    admin = [sleep.router] if settings.admin_key and role.has_model else []
    for router in (*role.routers(), operations.router, *admin):
        app.include_router(router, responses={"4XX": {"model": ErrorEnvelope}, "5XX": {"model": ErrorEnvelope}})
    chat = settings.shows_page and role.is_public
    app.include_router(page_router(chat, settings.docs, direct_only=settings.page is None))
    if settings.docs or chat:
        openapi.install(app, settings)
    errors.install(app)
    _add_middleware(app, settings, measure)
    if tracing is not None:
        app.add_middleware(tracing.middleware)
    return app


def _logs_access(settings: Settings) -> bool:
    return on_terminal(settings) if settings.access_log is None else settings.access_log


def _tracing(settings: Settings, server_metrics: ServerMetrics) -> "Tracing | None":
    if not settings.otel_endpoint:
        return None
    from server.http.tracing import Tracing  # noqa: PLC0415 - an extra, and most replicas do without

    return Tracing(settings, server_metrics.registry)


def _add_middleware(app: FastAPI, settings: Settings, measure: Callable[[Info], None]) -> None:
    """Add the middleware, innermost first."""
    app.add_middleware(HeadMiddleware)
    app.add_middleware(GateMiddleware)
    instrument(app, measure)
    secret = settings.internal_secret.get_secret_value() if settings.internal_secret else None
    app.add_middleware(
        ApiKeyMiddleware,
        keys=[key.get_secret_value() for key in settings.api_keys],
        internal_secret=secret,
        admin_key=settings.admin_key.get_secret_value() if settings.admin_key else None,
        open_probes=settings.open_probes,
    )
    app.add_middleware(OriginMiddleware, origins=settings.cors_origins)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "openai-processing-ms", "retry-after", "x-should-retry"],
        )
    app.add_middleware(
        RequestMiddleware, access_log=_logs_access(settings), logs_probes=settings.access_log is not None
    )
