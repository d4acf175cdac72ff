"""Whether the process is alive, and whether it takes requests."""

from fastapi import APIRouter

from protocol.errors import NotReadyEnvelope
from routers.state import NotReady, ReplicaDep

router = APIRouter(tags=["health"])


@router.get("/health/live", summary="Liveness")
async def live() -> dict[str, str]:
    """200 for as long as the process answers, which it does for as long as its event loop turns."""
    return {"status": "live"}


@router.get("/health/ready", summary="Readiness", responses={503: {"model": NotReadyEnvelope}})
@router.get("/health", summary="Readiness", operation_id="health", responses={503: {"model": NotReadyEnvelope}})
async def ready(replica: ReplicaDep) -> dict[str, str]:
    """200 when a request made now would be taken, else 503 with what is missing."""
    if missing := replica.missing:
        raise NotReady(missing)
    return {"status": "ready"}
