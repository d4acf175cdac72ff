"""GET /version."""

from fastapi import APIRouter

from protocol.models import Version
from routers.state import StateDep

router = APIRouter(tags=["models"])


@router.get("/version", summary="Version of the server")
async def version(state: StateDep) -> Version:
    return Version(version=state["version"])
