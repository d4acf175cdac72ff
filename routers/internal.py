"""/prefill, for decode replicas alone: one frame with what was handed over, after which the open answer is the lease of the KV blocks.

Nothing here is in the OpenAPI document, and the middleware lets nobody in but who has the internal secret.
"""

import asyncio
import logging

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from engine import handoff
from engine.base import DeltaIterator
from engine.errors import EngineFailure, EngineNotReady
from engine.types import Delta, GenerateRequest
from multimodal.errors import RequestError
from protocol.internal import ALIVE_SECONDS, MEDIA_TYPE, VERSION, PrefillRequest, frame
from routers.body import read_body
from routers.generate import disconnect
from routers.state import Replica, ReplicaDep, State, StateDep

router = APIRouter(include_in_schema=False)
GRACE_SECONDS = 2.0
"""From the end of an answer whose lease is over until the KV blocks go: who sees the end trusts nothing that it has not read by then."""

_envelopes = msgspec.msgpack.Decoder(PrefillRequest)
_requests = msgspec.msgpack.Decoder(GenerateRequest)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]

log = logging.getLogger(__name__)


@router.get("/prefill")
async def describe(replica: ReplicaDep) -> Response:
    """What this replica prefills with; 503 while it would take no request."""
    if not replica.ready:
        raise EngineNotReady("The engine is not ready, or closing.")
    assert replica.engine is not None, "the gate lets no request in before the engine is there"
    info = handoff.prefill_info(replica.model_name, replica.engine.info)
    return Response(msgspec.msgpack.encode(info), media_type=MEDIA_TYPE)


@router.post("/prefill")
async def prefill(request: Request, state: StateDep) -> Response:
    """Compute a prompt and its first token, and hold the KV blocks for as long as the answer is open, within the lease."""
    if request.headers.get("content-type") != MEDIA_TYPE:
        raise HTTPException(415, f"The body must be {MEDIA_TYPE}.", {"accept": MEDIA_TYPE})
    wanted = _read(await read_body(request, state["http"]), state["replica"])
    return HandoffAnswer(wanted, state)


@router.api_route("/v1/{path:path}", methods=_METHODS)
async def no_public_route(path: str) -> Response:
    raise HTTPException(404, "This is a prefill replica, which serves decode replicas only: send requests to one of those.")


def _read(raw: bytes, replica: Replica) -> GenerateRequest:
    """Raises RequestError for what is no request, HTTPException 409 for one of another version or model."""
    try:
        envelope = _envelopes.decode(raw)
        if envelope.version != VERSION:
            raise HTTPException(409, f"The request has version {envelope.version}; this replica reads version {VERSION}.")
        if envelope.model != replica.model_name:
            raise HTTPException(409, f"The request is for the model {envelope.model!r}; this replica has {replica.model_name!r}.")
        request = _requests.decode(envelope.request)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is no prefill request: {error}", code="malformed_request") from None
    return msgspec.structs.replace(request, prefill_only=True, handoff=None)


class HandoffAnswer(Response):
    """The frames of one prefill. Closed by the client at any time, it closes the engine's stream at once, and with it frees the blocks.

    What goes wrong before the first frame is raised from here with nothing sent; later it is a frame of its own.
    """

    def __init__(self, request: GenerateRequest, state: State) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        replica = state["replica"]
        assert replica.engine is not None, "the gate lets no request in before the engine is there"
        self._engine = replica.engine
        self._request = request
        self._lease_seconds = state["http"].lease_seconds
        self._render_error = state["render_error"]
        self._started = self._lease_is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._engine.generate(self._request)
        delta = asyncio.ensure_future(anext(stream))
        work = asyncio.create_task(self._answer(send, stream, delta))
        gone = asyncio.create_task(disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._lease_is_over:
                await asyncio.sleep(GRACE_SECONDS)
        finally:
            for task in (work, gone, delta):
                task.cancel()
            await stream.aclose()
            await asyncio.gather(delta, return_exceptions=True)
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()
        elif not self._started:
            raise ClientDisconnect

    async def _answer(self, send: Send, stream: DeltaIterator, computing: "asyncio.Future[Delta]") -> None:
        try:
            while not (await asyncio.wait({computing}, timeout=ALIVE_SECONDS))[0]:
                if not self._engine.healthy:  # one that is stuck would have its decode replica wait for as long as this one lives
                    raise EngineNotReady("The engine gives no sign of life.")
                await self._send(send, frame())
            delta = computing.result()
            payload = handoff.encode(handoff.handoff_of(self._engine.info.backend, delta))
            if len(payload) > handoff.MAX_BYTES:
                raise EngineFailure(f"what is to be handed over has {len(payload)} bytes; the most is {handoff.MAX_BYTES}")
        except Exception as error:  # whatever it was: it is rendered, here or, before anything is sent, where all errors are
            if not self._started:
                raise
            await self._send(send, frame(self._render_error(error), failed=True), last=True)
            return
        async with asyncio.timeout(self._lease_seconds):  # a client that does not read holds nothing for longer either
            await self._send(send, frame(payload), last=delta.held is None)
        if delta.held is not None:
            await self._hold(send, stream)

    async def _hold(self, send: Send, stream: DeltaIterator) -> None:
        """Until the lease is over, or the engine has lost the blocks. A client that needs them no more has this cancelled."""
        lost = asyncio.ensure_future(anext(stream))
        try:
            await asyncio.wait({lost}, timeout=self._lease_seconds)
            if lost.done():
                log.warning("the KV blocks held for %s are lost: %s", self._request.request_id, lost.exception())
            else:
                over = "the lease of %s is over: its KV blocks were not fetched in %g s"
                log.warning(over, self._request.request_id, self._lease_seconds)
                self._lease_is_over = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            await asyncio.wait({lost})
        finally:
            lost.cancel()

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})
