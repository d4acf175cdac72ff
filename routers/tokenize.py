"""POST /tokenize and /detokenize, with and without /v1."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from routers.body import json_body, request_body
from routers.generate import while_connected
from routers.state import ProcessorDep

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", summary="Text or chat to token ids", openapi_extra=request_body(TokenizeRequest))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(
    request: Request, processor: ProcessorDep, body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))]
) -> TokenizeResponse:
    """The token ids of a prompt, or of messages rendered by the chat template, which may have images."""
    return await while_connected(request, processor.tokenize(body))


@router.post("/detokenize", summary="Token ids to text", openapi_extra=request_body(DetokenizeRequest))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(
    processor: ProcessorDep, body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))]
) -> DetokenizeResponse:
    """The text of token ids."""
    return await processor.detokenize(body)
