"""GET /server_info: how this replica runs and is set, on every role."""

from fastapi import APIRouter

from protocol.models import ServerInfo
from routers.state import ReplicaDep, StateDep

router = APIRouter(tags=["models"])


@router.get("/server_info", summary="Runtime configuration and settings")
async def server_info(state: StateDep, replica: ReplicaDep) -> ServerInfo:
    """The runtime configuration as at /v1/models, and every setting but secrets and addresses; before the model is there, what is known."""
    return ServerInfo(
        model=replica.model_name,
        ready=replica.ready,
        runtime=state["runtime"](),
        settings=state["settings"],
    )
