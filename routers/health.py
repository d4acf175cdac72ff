"""Whether the process is alive, and whether it takes requests."""

from fastapi import APIRouter

from engine.errors import EngineNotReady
from routers.state import ReplicaDep

router = APIRouter(tags=["health"])


@router.get("/health/live", summary="Liveness")
async def live() -> dict[str, str]:
    """200 for as long as the process answers."""
    return {"status": "live"}


@router.get("/health/ready", summary="Readiness")
@router.get("/health", summary="Readiness", operation_id="health")
async def ready(replica: ReplicaDep) -> dict[str, str]:
    """200 when a request made now would be taken, else 503."""
    if replica.draining:
        raise EngineNotReady("The server is shutting down.")
    if not replica.ready:
        raise EngineNotReady(replica.loading if replica.core is None else "The engine is restarting, or no prefill replica answers.")
    return {"status": "ready"}
