"""POST /v1/completions."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from protocol.completions import Completion, CompletionRequest
from routers.body import json_body, request_body
from routers.generate import answer
from routers.state import ProcessorDep, RequestId

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/completions",
    response_model=Completion,
    summary="Create a completion",
    openapi_extra=request_body(CompletionRequest),
)
async def completions(
    request: Request,
    processor: ProcessorDep,
    request_id: RequestId,
    body: Annotated[CompletionRequest, Depends(json_body(CompletionRequest))],
) -> Response:
    """Continue one prompt or several. With `stream` the answer is a stream of server-sent events, closed by `data: [DONE]`."""
    return await answer(request, processor.completion(body, request_id), body.stream)
