"""GET /metrics, for Prometheus; trtllm-serve has it at /prometheus/metrics."""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from routers.state import StateDep

router = APIRouter(tags=["metrics"])


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
@router.get("/prometheus/metrics", include_in_schema=False)
async def metrics(state: StateDep) -> Response:
    """Metrics of all API processes and of the engine."""
    return Response(state["render_metrics"](), headers={"Content-Type": CONTENT_TYPE_LATEST})
