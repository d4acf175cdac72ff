"""/v1/messages/batches: Anthropic's batches of messages."""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import uuid4

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from multimodal.errors import RequestError
from protocol.batches import BatchesPage, BatchRequest, DeletedBatch, MessageBatch, RequestCounts
from protocol.messages import MessagesErrorEnvelope
from routers.batches.store import EXPIRY_SECONDS, OUTCOMES, BatchRecord, BatchStore
from routers.body import converted, json_body, request_body
from routers.state import ChatServiceDep, Owner, StateDep

PATH = "/v1/messages/batches"
BODIES = (BatchRequest,)
_ONE = f"{PATH}/{{message_batch_id}}"

router = APIRouter(
    tags=["batches"], responses={"4XX": {"model": MessagesErrorEnvelope}, "5XX": {"model": MessagesErrorEnvelope}}
)


async def _store(service: ChatServiceDep) -> BatchStore:
    """Return the store of batches. Raises RequestError."""
    if service.batches is None:
        raise RequestError("This server stores no batches (BATCHES_MB).", None, "unsupported_parameter")
    return service.batches


Store = Annotated[BatchStore, Depends(_store)]


@router.post(PATH, summary="Create a batch of messages", openapi_extra=request_body(BatchRequest))
async def create(
    request: Request,
    state: StateDep,
    store: Store,
    owner: Owner,
    body: Annotated[BatchRequest, Depends(json_body(BatchRequest))],
) -> MessageBatch:
    """Create a batch, whose requests are answered within 24 hours, when the server is otherwise idle."""
    if len(body.requests) > store.max_requests:
        raise RequestError(
            f"'requests' may have {store.max_requests} entries at most (BATCH_MAX_REQUESTS).", "requests"
        )
    places: dict[str, int] = {}
    for place, one in enumerate(body.requests):
        if places.setdefault(one.custom_id, place) != place:
            param = f"requests.{place}.custom_id"
            raise RequestError(f"'{param}' is that of 'requests.{places[one.custom_id]}', too.", param)

    def bodies() -> list[tuple[str, bytes]]:
        return [(one.custom_id, json.dumps(one.params).encode()) for one in body.requests]

    record = await store.create(owner, f"msgbatch_{uuid4().hex}", await converted(state, bodies))
    return _shown(record, request)


@router.get(PATH, summary="List batches of messages")
async def batches(
    request: Request,
    store: Store,
    owner: Owner,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> BatchesPage:
    """The batches of this key, the newest first."""
    found, more = await store.page(owner, limit, after_id, before_id)
    data = [_shown(record, request) for record in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return BatchesPage(data=data, has_more=more, first_id=first, last_id=last)


@router.get(_ONE, summary="Look at a batch of messages")
async def batch(request: Request, store: Store, owner: Owner, message_batch_id: str) -> MessageBatch:
    """A batch and its progress."""
    return _shown(await store.get(owner, message_batch_id), request)


@router.post(f"{_ONE}/cancel", summary="Cancel a batch of messages")
async def cancel(request: Request, store: Store, owner: Owner, message_batch_id: str) -> MessageBatch:
    """Cancel the waiting requests of a batch; running ones finish."""
    return _shown(await store.cancel(owner, message_batch_id), request)


@router.delete(_ONE, summary="Delete a batch of messages")
async def delete(store: Store, owner: Owner, message_batch_id: str) -> DeletedBatch:
    """Delete a batch that has ended, and its results."""
    await store.delete(owner, message_batch_id)
    return DeletedBatch(id=message_batch_id)


@router.get(f"{_ONE}/results", summary="Results of a batch of messages", response_class=Response)
async def results(store: Store, owner: Owner, message_batch_id: str) -> Response:
    """The results of a batch that has ended: a line of JSON for each request."""
    record = await store.get(owner, message_batch_id)
    if record.ended is None:
        raise RequestError("The batch has not ended yet.", "message_batch_id")

    async def lines() -> AsyncIterator[bytes]:
        place = 0
        while found := await store.results(record, place):
            place += len(found)
            yield b"".join(_line(*result) for result in found)

    return StreamingResponse(lines(), media_type="application/x-jsonl")


def _line(custom_id: str, outcome: str, result: bytes) -> bytes:
    given: Any = orjson.Fragment(result) if result else {"type": outcome}
    return orjson.dumps({"custom_id": custom_id, "result": given}) + b"\n"


def _shown(record: BatchRecord, request: Request) -> MessageBatch:
    ended = record.ended is not None
    counts = {outcome: record.counts.get(outcome, 0) for outcome in OUTCOMES}
    return MessageBatch(
        id=record.id,
        processing_status="ended" if ended else "in_progress" if record.canceled is None else "canceling",
        request_counts=RequestCounts(processing=0 if ended else record.total, **counts),
        created_at=_time(record.created),
        expires_at=_time(record.created + EXPIRY_SECONDS),
        ended_at=_time(record.ended),
        cancel_initiated_at=_time(record.canceled),
        results_url=f"{request.base_url}{PATH[1:]}/{record.id}/results" if ended else None,
    )


def _time(seconds: float | None) -> Any:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
