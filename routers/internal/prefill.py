"""/prefill, for decode replicas: frames with early handoffs, then one with the handoff; the open answer is then the
lease of the KV blocks."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request, Response

from engine import trace
from engine.base import DeltaStream
from engine.errors import EngineError, EngineFailure, EngineNotReady
from engine.kit import handoff
from engine.types import Delta, GenerateRequest, is_early
from multimodal.errors import RequestError
from protocol.internal import MAX_EMBEDDING_BYTES, MEDIA_TYPE, PrefillRequest, head_of, parts_of
from routers.body import converted
from routers.errors import WrongReplica
from routers.internal.leased import LeasedAnswer, check_fits, read_message
from routers.state import PrefillService, PrefillServiceDep, ReplicaDep, StateDep

router = APIRouter(include_in_schema=False)

_envelopes = msgspec.msgpack.Decoder(PrefillRequest)
_requests = msgspec.msgpack.Decoder(GenerateRequest)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]


@router.get("/prefill")
async def describe(replica: ReplicaDep, service: PrefillServiceDep) -> Response:
    """Describe the model and cache of this prefill replica; 503 while it accepts no requests."""
    if not replica.ready:
        raise EngineNotReady("The engine is not ready, or closing.")
    info = handoff.prefill_info(replica.model_name, service.engine.info)
    return Response(msgspec.msgpack.encode(info), media_type=MEDIA_TYPE)


@router.post("/prefill")
async def prefill(request: Request, state: StateDep, service: PrefillServiceDep) -> Response:
    """Compute a prompt and its first token. The KV blocks are held while the answer is open, within the lease."""
    options = state["http"]
    images = options.max_images * max(MAX_EMBEDDING_BYTES, options.max_image_bytes)
    body = await read_message(request, options, options.max_body_bytes + images)
    model = state["replica"].model_name
    wanted = await converted(state, lambda: _read(body, model))
    return LeasedAnswer(_PrefillWork(wanted, service), state)


def no_public_routes(what: str) -> APIRouter:
    """Return a router that refuses /v1; `what` describes this replica, which serves other replicas only."""
    refusing = APIRouter(include_in_schema=False)

    @refusing.api_route("/v1/{path:path}", methods=_METHODS)
    async def refuse(path: str) -> Response:
        raise WrongReplica(
            f"This is {what}, which serves other replicas only: send requests to a decode or an aggregated one."
        )

    return refusing


def _read(raw: bytes, model: str) -> GenerateRequest:
    """Decode a request. Raises RequestError, ReplicasDiffer for one of another version or model."""
    try:
        envelope, rest = head_of(raw, _envelopes)
        check_fits(envelope.version, envelope.model, model)
        request = _requests.decode(envelope.request).attach(parts_of(rest, envelope.sizes))
    except ValueError as error:
        raise RequestError(f"The body is not a prefill request: {error}", code="malformed_request") from None
    return msgspec.structs.replace(request, prefill_only=True, handoff=None, trace=trace.headers())


@dataclass(eq=False)
class _PrefillWork:
    """A prompt in the engine. Closing its stream frees the KV blocks."""

    request: GenerateRequest
    service: PrefillService
    _stream: DeltaStream | None = None

    @property
    def held(self) -> str:
        return f"the KV blocks of {self.request.request_id}"

    @property
    def healthy(self) -> bool:
        return self.service.engine.healthy

    async def compute(self, announce: Callable[[bytes], Awaitable[None]]) -> tuple[bytes, bool]:
        stages = trace.Stages()
        engine, tokens = self.service.engine, len(self.request.prompt_token_ids)
        self._stream = engine.generate(self.request)
        self.service.waiting_tokens += tokens
        try:
            while is_early(delta := await anext(self._stream)):
                await announce(self._encoded(delta))
        except BaseException as error:  # cancellation included
            stages.end(0, error)
            raise
        finally:
            self.service.waiting_tokens -= tokens
        if delta.prompt is not None:
            stages.begun(delta.prompt, delta.prompt.prompt_tokens or tokens)
        return self._encoded(delta), delta.held is not None

    def _encoded(self, delta: Delta) -> bytes:
        payload = handoff.encode(handoff.handoff_of(self.service.engine.info.backend, delta))
        if len(payload) > handoff.MAX_BYTES:
            raise EngineFailure(f"the handoff has {len(payload)} bytes; the most is {handoff.MAX_BYTES}")
        return payload

    async def lost(self) -> str:
        assert self._stream is not None, "something is held"
        try:
            await anext(self._stream)
        except (EngineError, StopAsyncIteration) as error:
            return str(error) or "the engine has ended them"
        return "the engine goes on with them"

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
