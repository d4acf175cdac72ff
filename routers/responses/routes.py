"""POST /v1/responses and the routes beside it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from time import time
from typing import Annotated, Any, Literal
from uuid import uuid4

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.types import Scope

from engine.errors import ContextOverflow
from multimodal.answers.responses import ResponsesShape, seal
from multimodal.errors import RequestError
from multimodal.processor import Generation
from multimodal.request import Ask, Conversation
from protocol import responses as wire
from protocol.responses import CompactRequest, ContextFields, InputItem, InputTokensRequest, ResponsesRequest
from routers.body import converted, json_body, request_body, while_connected
from routers.endpoint import Endpoint, EventStream, NamedEvents
from routers.responses.convert import asked_of, context, conversation_of, convert
from routers.responses.service import ErrorOf, Kept, Responses, numbered
from routers.responses.store import Record
from routers.state import ChatService, ChatServiceDep, DpRank, Owner, RequestId, State, StateDep

PATH = "/v1/responses"
PATHS = (f"{PATH}/input_tokens", f"{PATH}/compact")
BODIES = (InputTokensRequest, CompactRequest)
_COMPACT = (
    "Summarise the conversation so far for whoever continues it without having read it: what was asked, what has been"
    " decided and done, what is left to do, and every fact, name and number that will be needed. Write nothing else."
)
_COMPACT_TOKENS = (128, 4096)
"""Minimum and maximum tokens of a summary; between them, a rough estimate of the conversation's tokens decides."""
_CHARACTERS_PER_TOKEN = 4
_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
"""OpenAI's codes of failed responses, by type of error."""

router = APIRouter(tags=["responses"])


class ResponseEvents(NamedEvents):
    """Events of a response; `[DONE]` follows the last, as the Open Responses specification wants it."""

    described = (
        "The JSON of one event's `data:` line. The line `event:` before it repeats its `type`. After the last event"
        " comes `data: [DONE]`."
    )
    end = b"data: [DONE]\n\n"

    def event(self, payload: bytes) -> bytes:
        if payload.startswith(b'{"error"'):  # from the relay of a router, which does not count events
            error = orjson.loads(payload)["error"]
            payload = orjson.dumps({"type": "error", "sequence_number": 0, **_flat(error), "error": error})
        return super().event(payload)


@dataclass(frozen=True, kw_only=True)
class ResponsesEndpoint(Endpoint[ResponsesRequest]):
    """The record of POST /v1/responses, whose answers may be stored or made in the background."""

    def router(self) -> APIRouter:
        return router


@dataclass(frozen=True)
class PreparedResponse:
    """A response that has not begun."""

    record: Record
    earlier: Sequence[Record]
    """The response that it continues, after those before it."""
    generation: Generation
    shape: ResponsesShape


@router.post(
    PATH,
    name="responses",
    response_model=wire.Response,
    summary="Create a response",
    description="Answer input. With `stream` the answer is a stream of server-sent events.",
    openapi_extra=request_body(ResponsesRequest),
)
async def create(
    request: Request,
    state: StateDep,
    service: ChatServiceDep,
    request_id: RequestId,
    owner: Owner,
    dp_rank: DpRank,
    body: Annotated[ResponsesRequest, Depends(json_body(ResponsesRequest))],
) -> Response:
    """Answer, or begin a background response."""
    responses = service.responses
    error_of = partial(failure, state, request.scope)
    prepared = await while_connected(request, prepare(state, service, body, owner, request_id, dp_rank))
    record, generation, shape = prepared.record, prepared.generation, prepared.shape
    if body.background:
        state["replica"].enter()
        begun = await responses.begin(record, generation, shape, error_of, state["replica"].leave)
        if not body.stream:
            return Response(begun, media_type="application/json")
        return _stream(state, responses.follow(owner, record.id, -1))
    if body.stream:
        return _stream(state, events(responses, prepared, error_of))
    content = await while_connected(request, generation.complete())
    if shape.stored and not await responses.save(record, shape):
        content = orjson.dumps(orjson.loads(content) | {"store": False})
    return Response(content, media_type="application/json")


@router.post(
    f"{PATH}/input_tokens",
    response_model=wire.InputTokens,
    summary="Count the tokens of an input",
    openapi_extra=request_body(InputTokensRequest),
)
async def input_tokens(
    request: Request,
    state: StateDep,
    service: ChatServiceDep,
    owner: Owner,
    body: Annotated[InputTokensRequest, Depends(json_body(InputTokensRequest))],
) -> wire.InputTokens:
    """The number of tokens of the prompt that a response to this input would have."""
    await converted(state, lambda: service.fields.check(body))
    history = await service.responses.history(owner, body)
    ask = await converted(state, lambda: context(_with_input(body, history.own), history.earlier))
    ids = await while_connected(request, service.processor.tokenize(ask))
    return wire.InputTokens(input_tokens=len(ids))


@router.post(
    f"{PATH}/compact",
    response_model=wire.CompactedResponse,
    summary="Compact a conversation",
    openapi_extra=request_body(CompactRequest),
)
async def compact(
    request: Request,
    state: StateDep,
    service: ChatServiceDep,
    request_id: RequestId,
    owner: Owner,
    dp_rank: DpRank,
    body: Annotated[CompactRequest, Depends(json_body(CompactRequest))],
) -> wire.CompactedResponse:
    """The input of the next request: the user's messages, and a summary by the model in place of the rest."""
    await converted(state, lambda: service.fields.check(body))
    given = ContextFields(
        input=body.input, instructions=body.instructions, previous_response_id=body.previous_response_id
    )
    history = await service.responses.history(owner, given)
    if not (history.own or history.earlier):
        raise RequestError("'input' is missing.", "input")
    order = InputItem(type="message", role="user", content=_COMPACT)
    ordered = given.model_copy(update={"input": [*history.own, order]})
    ask = await converted(state, lambda: context(ordered, history.earlier))
    assert isinstance(ask.prompt, Conversation)
    fewest, most = _COMPACT_TOKENS
    ask = Ask(
        prompt=ask.prompt,
        fields=ask.fields,
        default_max_tokens=min(max(fewest, ask.prompt.characters // _CHARACTERS_PER_TOKEN), most),
        include_reasoning=False,
        temperature=0.0,
    )
    generation = await while_connected(request, service.processor.prepare(ask, ResponsesShape, request_id, dp_rank))
    answer = orjson.loads(await while_connected(request, generation.complete()))
    text = "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
    unique = uuid4().hex
    asked = [item for item in (*history.earlier, *history.own) if item.role == "user"]
    summary = {"id": f"cmp_{unique}", "type": "compaction", "encrypted_content": seal(text)}
    return wire.CompactedResponse(
        id=f"resp_{unique}",
        created_at=int(time()),
        output=[*orjson.loads(numbered(asked, unique)), summary],
        usage=answer["usage"],
    )


@router.get(f"{PATH}/{{response_id}}", response_model=wire.Response, summary="A stored response")
async def retrieve(
    state: StateDep,
    service: ChatServiceDep,
    owner: Owner,
    response_id: str,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """A stored response or, with `stream`, the events of one made with `background`, those after `starting_after`."""
    record = await service.responses.get(owner, response_id)
    if not stream:
        return Response(record.response, media_type="application/json")
    if not record.background:
        raise RequestError("Only responses made with 'background' can be streamed again.", "stream")
    return _stream(state, service.responses.follow(owner, response_id, starting_after))


@router.delete(f"{PATH}/{{response_id}}", summary="Delete a stored response")
async def delete(service: ChatServiceDep, owner: Owner, response_id: str) -> wire.DeletedResponse:
    """Delete a stored response; one that runs ends."""
    await service.responses.delete(owner, response_id)
    return wire.DeletedResponse(id=response_id)


@router.post(f"{PATH}/{{response_id}}/cancel", response_model=wire.Response, summary="Cancel a background response")
async def cancel(service: ChatServiceDep, owner: Owner, response_id: str) -> Response:
    """Cancel a background response, unless it has ended, and return it."""
    return Response((await service.responses.cancel(owner, response_id)).response, media_type="application/json")


@router.get(f"{PATH}/{{response_id}}/input_items", summary="Input items of a stored response")
async def input_items(
    service: ChatServiceDep,
    owner: Owner,
    response_id: str,
    after: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
) -> wire.ItemList:
    """A page of the input items of a response, including those of the responses that it continues."""
    items = await service.responses.items(owner, response_id)
    if order == "desc":
        items = items[::-1]
    if after is not None:
        start = next((place for place, item in enumerate(items, 1) if item["id"] == after), None)
        if start is None:
            raise RequestError("'after' must be the id of an item.", "after")
        items = items[start:]
    page = items[:limit]
    return wire.ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > limit,
    )


async def prepare(
    state: State,
    service: ChatService,
    body: ResponsesRequest,
    owner: str,
    request_id: str,
    dp_rank: int | None,
    kept: Kept | None = None,
) -> PreparedResponse:
    """Prepare a response, on a connection that has `kept` others. Raises the errors of preparing a chat."""
    await converted(state, lambda: service.fields.check(body))
    if body.background and body.store is False:
        raise RequestError("'background' needs 'store'.", "background")
    responses = service.responses
    if body.background:
        responses.stored()
    history = await responses.history(owner, body, kept)
    unique = uuid4().hex
    ask = await converted(state, lambda: convert(_with_input(body, history.own), history.earlier))
    shape = partial(ResponsesShape, asked=asked_of(body, ask, unique, service.processor.defaults))
    make = partial(service.processor.prepare, shape=shape, request_id=request_id, dp_rank=dp_rank)
    generation = await (_fitting(make, ask) if body.truncation == "auto" else make(ask))
    assert isinstance(generation.shape, ResponsesShape)
    record = Record(
        id=generation.shape.id,
        owner=owner,
        created=time(),
        status="queued",
        background=bool(body.background),
        previous=history.previous,
        conversation=conversation_of(body),
        response=b"",
        items=await converted(state, lambda: numbered(history.own, unique)),
    )
    return PreparedResponse(record, history.records, generation, generation.shape)


async def events(responses: Responses, prepared: PreparedResponse, error_of: ErrorOf) -> AsyncGenerator[bytes]:
    """Yield the events of a response, which is stored before the last of them. An exception before the first event is
    raised from here; a later one becomes an event.
    """
    shape = prepared.shape
    begun = False

    async def ended(event: bytes) -> bytes:
        if not shape.stored or await responses.save(prepared.record, shape):
            return event
        last = orjson.loads(event)
        last["response"]["store"] = False
        return orjson.dumps(last)

    try:
        async with aclosing(prepared.generation.stream()) as chunks:
            async for event in chunks:
                begun = True
                yield await ended(event) if shape.ended else event
    except Exception as error:
        if not begun or shape.ended:
            raise
        *others, last = shape.break_off("failed", error_of(error))
        for event in others:
            yield event
        yield await ended(last)


def failure(state: State, scope: Scope, error: Exception) -> dict[str, Any]:
    """Return the `error` of a response that failed."""
    rendered = orjson.loads(state["render_error"](error, scope))["error"]
    return {"code": _CODES.get(rendered["type"], "server_error"), "message": rendered["message"]}


async def _fitting(make: Any, ask: Ask) -> Generation:
    """Prepare a request, and drop as few of its oldest messages as necessary to fit the context. System messages at the
    beginning stay, and the rest begins with a user's message.
    """
    try:
        generation: Generation = await make(ask)
        return generation
    except ContextOverflow:
        chat = ask.prompt
        assert isinstance(chat, Conversation)
        roles = [message["role"] for message in chat.messages]
        head = next((place for place, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
        cuts = [place for place in range(head + 1, len(roles)) if roles[place] == "user"]
        low, high = 0, len(cuts) - 1
        found: Generation | None = None
        while low <= high:
            middle = (low + high) // 2
            try:
                found = await make(_cut(ask, chat, head, cuts[middle]))
                high = middle - 1
            except ContextOverflow:
                low = middle + 1
        if found is None:
            raise
        return found


def _cut(ask: Ask, chat: Conversation, head: int, first: int) -> Ask:
    """Return a request without the messages from `head` to before `first`."""
    kept = _media(chat.messages[:head])
    dropped = _media(chat.messages[head:first])
    media = [*chat.media[:kept], *chat.media[kept + dropped :]]
    return replace(ask, prompt=replace(chat, messages=[*chat.messages[:head], *chat.messages[first:]], media=media))


def _media(messages: list[dict[str, Any]]) -> int:
    contents = (message["content"] for message in messages)
    return sum(part["type"] != "text" for content in contents if isinstance(content, list) for part in content)


def _with_input(body: Any, items: list[InputItem]) -> Any:
    """Return a body whose input is these items."""
    return body.model_copy(update={"input": items}) if isinstance(body.input, list) else body


def _stream(state: State, payloads: AsyncGenerator[bytes]) -> EventStream:
    return EventStream(payloads, FRAMING, state["http"].ping_interval, state["render_error"])


def _flat(error: dict[str, Any]) -> dict[str, Any]:
    return {name: error.get(name) for name in ("code", "message", "param")}


FRAMING = ResponseEvents()
ENDPOINT = ResponsesEndpoint(
    path=PATH,
    name="responses",
    summary="Create a response",
    description="Answer input.",
    body=ResponsesRequest,
    chunk="ResponseEvent",
    answer=wire.Response,
    convert=convert,
    shape=ResponsesShape,
    framing=FRAMING,
)
