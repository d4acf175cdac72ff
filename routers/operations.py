"""Operations, on every role: health, metrics, the version, and how the replica runs."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from protocol.errors import NotReadyEnvelope
from protocol.models import ServerInfo, Version
from routers.errors import NotReady
from routers.state import ReplicaDep, StateDep

router = APIRouter()


@router.get("/health/live", summary="Liveness", tags=["health"])
async def live() -> dict[str, str]:
    """200 as long as the process answers, that is, as long as its event loop runs."""
    return {"status": "live"}


@router.get("/health/ready", summary="Readiness", tags=["health"], responses={503: {"model": NotReadyEnvelope}})
@router.get(
    "/health",
    summary="Readiness",
    operation_id="health",
    tags=["health"],
    responses={503: {"model": NotReadyEnvelope}},
)
async def ready(replica: ReplicaDep) -> dict[str, str]:
    """200 if a request made now would be accepted, otherwise 503 with the missing parts."""
    if missing := replica.missing:
        raise NotReady(missing)
    return {"status": "ready"}


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    tags=["metrics"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
@router.get("/prometheus/metrics", include_in_schema=False)
async def metrics(state: StateDep) -> Response:
    """Metrics of all API processes and of the engine."""
    return Response(state["render_metrics"](), headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/server_info", summary="Runtime configuration and settings", tags=["models"])
async def server_info(state: StateDep, replica: ReplicaDep) -> ServerInfo:
    """The runtime configuration as at /v1/models, and every setting except secrets and addresses. Before the model has
    loaded, some facts are missing.
    """
    return ServerInfo(
        model=replica.model_name,
        ready=replica.ready,
        runtime=state["runtime"](),
        settings=state["settings"],
    )


@router.get("/version", summary="Version of the server", tags=["models"])
async def version(state: StateDep) -> Version:
    return Version(version=state["version"])
