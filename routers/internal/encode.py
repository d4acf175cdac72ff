"""/encode, for replicas whose prompts have images: one frame with their embeddings, or with the location of embeddings
in memory. In that case the open answer is the lease of the memory.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request, Response

from engine import trace
from engine.errors import EngineNotReady
from engine.media import MediaInput, attach_media
from engine.replicas.encode_answers import EncodeService, HeldEmbeddings
from multimodal.errors import RequestError
from protocol.internal import MAX_MEDIA, MAX_MEDIA_BYTES, MEDIA_TYPE, EncodeRequest, head_of, parts_of
from routers.body import converted
from routers.errors import WrongReplica
from routers.internal.leased import LeasedAnswer, check_fits, read_message
from routers.state import EncodingDep, HttpOptions, PrefillService, ReplicaDep, RequestId, StateDep

router = APIRouter(include_in_schema=False)
_ENVELOPE_BYTES = 1 << 20

_envelopes = msgspec.msgpack.Decoder(EncodeRequest)
_media = msgspec.msgpack.Decoder(list[MediaInput])


@router.get("/encode")
async def describe(replica: ReplicaDep, encoding: EncodingDep) -> Response:
    """Describe the encoder of this replica; 503 while it accepts no images."""
    service = _service(encoding)
    if not (replica.ready and service.healthy):
        raise EngineNotReady("The encoder is not ready, or closing.")
    return Response(msgspec.msgpack.encode(service.info), media_type=MEDIA_TYPE)


@router.post("/encode")
async def encode(request: Request, state: StateDep, encoding: EncodingDep, request_id: RequestId) -> Response:
    """Encode images. Embeddings that are not in the answer are held while it is open, within the lease."""
    options = state["http"]
    model = state["replica"].model_name
    service = _service(encoding)
    most = max(  # a prompt's images come together
        MAX_MEDIA_BYTES, options.max_images * options.max_image_bytes, options.max_video_bytes, options.max_audio_bytes
    )
    body = await read_message(request, options, most + _ENVELOPE_BYTES)
    wanted, images = await converted(state, lambda: _read(body, model, options))
    return LeasedAnswer(_EncodeWork(service, wanted, images, f"the embeddings of {request_id}"), state)


def _service(service: PrefillService | EncodeService) -> EncodeService:
    encoding = service.encoding if isinstance(service, PrefillService) else service
    if encoding is None:
        raise WrongReplica("This replica encodes no images: its model takes neither images nor audio.")
    return encoding


def _read(raw: bytes, model: str, options: HttpOptions) -> tuple[EncodeRequest, list[MediaInput]]:
    """Decode a request. Raises RequestError, ReplicasDiffer for one of another version or model."""
    try:
        envelope, rest = head_of(raw, _envelopes)
        check_fits(envelope.version, envelope.model, model)
        images = attach_media(_media.decode(envelope.media), parts_of(rest, envelope.sizes))
    except ValueError as error:
        raise RequestError(f"The body is not an encode request: {error}", code="malformed_request") from None
    most = options.max_images if envelope.prompt else MAX_MEDIA
    if not 0 < len(images) <= most:
        raise RequestError(f"The request has {len(images)} images; from 1 to {most} are taken at once.", "image")
    for image in images:
        limit = {
            "image": options.max_image_bytes,
            "video": options.max_video_bytes,
            "audio": options.max_audio_bytes,
        }[image.kind]
        if len(image.data) > limit:
            raise RequestError(f"An {image.kind} has {len(image.data)} bytes; the most is {limit}.", image.kind)
    return envelope, images


@dataclass(eq=False)
class _EncodeWork:
    """The images of one request. Closing it frees their embeddings."""

    service: EncodeService
    request: EncodeRequest
    images: list[MediaInput]
    held: str
    _held: HeldEmbeddings | None = None

    @property
    def healthy(self) -> bool:
        return self.service.healthy

    async def compute(self, announce: Callable[[bytes], Awaitable[None]]) -> tuple[bytes, bool]:
        with trace.span("encode", {"trellis.images": len(self.images)}):
            payload, self._held = await self.service.encode(self.request, self.images)
        self.images = []
        return payload, self._held is not None

    async def lost(self) -> str:
        """Never return: the memory is this process's own."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        if self._held is not None:
            self.service.free(self._held)
            self._held = None
