"""/encode, for other replicas: one frame with embeddings, or with where they are; the open answer is then their lease."""

import asyncio

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from engine import trace
from engine.errors import EngineNotReady
from engine.media import MediaInput
from engine.process.attachments import attach_media
from engine.replicas.encode_service import EncodeService
from engine.transfer.arena import Place
from multimodal.errors import RequestError
from protocol.internal import MAX_MEDIA, MAX_MEDIA_BYTES, MEDIA_TYPE, EncodeRequest, head_of, parts_of
from routers.leased import LeasedAnswer, check_fits, read_message
from routers.state import HttpOptions, Replica, ReplicaDep, RequestId, StateDep

router = APIRouter(include_in_schema=False)
_ENVELOPE_BYTES = 1 << 20

_envelopes = msgspec.msgpack.Decoder(EncodeRequest)
_media = msgspec.msgpack.Decoder(list[MediaInput])


@router.get("/encode")
async def describe(replica: ReplicaDep) -> Response:
    """What this replica encodes with; 503 while it would take no images."""
    service = _service(replica)
    if not (replica.ready and service.healthy):
        raise EngineNotReady("The encoder is not ready, or closing.")
    return Response(msgspec.msgpack.encode(service.info), media_type=MEDIA_TYPE)


@router.post("/encode")
async def encode(request: Request, state: StateDep, request_id: RequestId) -> Response:
    """Encode images, and hold the embeddings that are not in the answer for as long as it is open, within the lease."""
    replica, options = state["replica"], state["http"]
    service = _service(replica)
    limit = (
        max(MAX_MEDIA_BYTES, options.max_images * options.max_image_bytes) + _ENVELOPE_BYTES
    )  # a prompt's images come together
    wanted, images = await asyncio.to_thread(_read, await read_message(request, options, limit), replica, options)
    return LeasedAnswer(_Encode(service, wanted, images, f"the embeddings of {request_id}"), state)


def _service(replica: Replica) -> EncodeService:
    if replica.encoding is None:
        raise HTTPException(404, "This replica encodes no images: its model has no vision tower.")
    return replica.encoding


def _read(raw: bytes, replica: Replica, options: HttpOptions) -> tuple[EncodeRequest, list[MediaInput]]:
    """Raises RequestError for what is no request or too much, HTTPException 409 for one of another version or model."""
    try:
        envelope, rest = head_of(raw, _envelopes)
        check_fits(envelope.version, envelope.model, replica)
        images = attach_media(_media.decode(envelope.media), parts_of(rest, envelope.sizes))
    except ValueError as error:
        raise RequestError(f"The body is no encode request: {error}", code="malformed_request") from None
    most = options.max_images if envelope.prompt else MAX_MEDIA
    if not 0 < len(images) <= most:
        raise RequestError(f"The request has {len(images)} images; from 1 to {most} are taken at once.", "image")
    if (size := max(len(image.data) for image in images)) > options.max_image_bytes:
        raise RequestError(f"An image has {size} bytes; the most is {options.max_image_bytes}.", "image")
    return envelope, images


class _Encode:
    """The images of one request. Closing it frees the embeddings."""

    def __init__(self, service: EncodeService, request: EncodeRequest, images: list[MediaInput], name: str) -> None:
        self.held = name
        self._service, self._request, self._images = service, request, images
        self._place: Place | None = None

    @property
    def healthy(self) -> bool:
        return self._service.healthy

    async def compute(self) -> tuple[bytes, bool]:
        with trace.span("encode", {"trellis.images": len(self._images)}):
            payload, self._place = await self._service.encode(self._request, self._images)
        self._images = []
        return payload, self._place is not None

    async def lost(self) -> str:
        """Never: the memory is this process' own."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        if self._place is not None:
            self._service.free(self._place)
            self._place = None
