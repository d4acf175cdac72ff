"""/reset_prefix_cache, /start_profile and /stop_profile: routes of every replica with an engine, for operators."""

import asyncio
import time
from pathlib import Path
from uuid import uuid4

from fastapi import APIRouter, Response

from engine.errors import NotSupported
from routers.state import EngineServiceDep, State, StateDep

router = APIRouter(include_in_schema=False)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(service: EngineServiceDep) -> Response:
    """Drop every reusable KV block on the device, the host and the disk."""
    await service.engine.reset_prefix_cache()
    return Response()


@router.post("/start_profile")
async def start_profile(state: StateDep, service: EngineServiceDep) -> Response:
    """Record what the engine computes until /stop_profile."""
    _profile_folder(state)
    await service.engine.start_profile()
    return Response()


@router.post("/stop_profile")
async def stop_profile(state: StateDep, service: EngineServiceDep) -> dict[str, str]:
    """Write the recorded profile into PROFILE_DIR, for chrome://tracing or Perfetto, and return the file's path."""
    name = f"trellis-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:8]}.json.gz"
    trace_file = _profile_folder(state) / name
    await asyncio.to_thread(trace_file.parent.mkdir, parents=True, exist_ok=True)
    await service.engine.stop_profile(str(trace_file))
    return {"trace": str(trace_file)}


def _profile_folder(state: State) -> Path:
    folder = state["profile_dir"]
    if folder is None:
        raise NotSupported("there is no folder for profiles: set PROFILE_DIR")
    return folder
