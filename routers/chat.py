"""POST /v1/chat/completions."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from protocol.chat import ChatCompletion, ChatCompletionRequest
from routers.body import json_body, request_body
from routers.generate import answer
from routers.state import ProcessorDep, RequestId

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    summary="Create a chat completion",
    openapi_extra=request_body(ChatCompletionRequest),
)
async def chat_completions(
    request: Request,
    processor: ProcessorDep,
    request_id: RequestId,
    body: Annotated[ChatCompletionRequest, Depends(json_body(ChatCompletionRequest))],
) -> Response:
    """Answer a chat. With `stream` the answer is a stream of server-sent events, closed by `data: [DONE]`."""
    return await answer(request, processor.chat(body, request_id), body.stream)
