"""POST /tokenize and /detokenize, with and without /v1."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from multimodal.errors import RequestError
from multimodal.request import Ask
from protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from routers.body import converted, json_body, request_body, while_connected
from routers.chat import conversation, shown_tools
from routers.state import ChatServiceDep, StateDep

router = APIRouter(tags=["tokens"])
PATHS = ("/tokenize", "/detokenize")
BODIES = (TokenizeRequest, DetokenizeRequest)


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    summary="Text or chat to token ids",
    openapi_extra=request_body(TokenizeRequest),
)
@router.post(
    "/v1/tokenize",
    response_model=TokenizeResponse,
    summary="Text or chat to token ids",
    openapi_extra=request_body(TokenizeRequest),
)
async def tokenize(
    request: Request,
    state: StateDep,
    service: ChatServiceDep,
    body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))],
) -> Response:
    """The token ids of a prompt, or of messages, possibly with images, rendered by the chat template."""
    service.fields.check_model(body.model)
    ask = await converted(state, lambda: convert(body))
    ids = await while_connected(request, service.processor.tokenize(ask))
    strings = await service.processor.strings(ids) if body.return_token_strs else None
    length = service.engine.info.context_length
    answer = {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}
    return Response(msgspec.json.encode(answer), media_type="application/json")  # not validated: it may be long


@router.post("/detokenize", summary="Token ids to text", openapi_extra=request_body(DetokenizeRequest))
@router.post("/v1/detokenize", summary="Token ids to text", openapi_extra=request_body(DetokenizeRequest))
async def detokenize(
    service: ChatServiceDep, body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))]
) -> DetokenizeResponse:
    """The text of token ids."""
    service.fields.check_model(body.model)
    return DetokenizeResponse(prompt=await service.processor.detokenize(body.tokens))


def convert(body: TokenizeRequest) -> Ask:
    """Return the request whose prompt is to be tokenised. Raises RequestError."""
    if body.messages is not None and body.prompt is None:
        chat = conversation(body, body.messages, {}, shown_tools(body.tools))
        return Ask(prompt=chat, add_special_tokens=body.add_special_tokens is True)
    if body.messages is None and body.prompt is not None:
        return Ask(prompt=[body.prompt], add_special_tokens=body.add_special_tokens is not False)
    raise RequestError("Give either 'prompt' or 'messages'.", "prompt")
