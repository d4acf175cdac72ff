"""Embeddings on their way from an encode replica: the codec of its answer, and the memory in which those wait that are read by transfer.

What was read is checked against a digest, so that no clock has to say whether its memory was still the same.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
from blake3 import blake3

from engine import handoff
from engine.encoder import EncodedImage, EncoderInfo
from engine.errors import InvalidRequest, QueueFull
from engine.kit.checks import ITEM_BYTES
from engine.transfer.arena import Arena, Place
from engine.transfer.base import Offer, TransferError
from engine.transfer.shared_bytes import Data, readable
from engine.transfer.transfers import MethodName
from protocol import internal

ARENA_BYTES = 1 << 30
"""Most bytes of embeddings that wait to be read, or are being read, at one time."""
ROOM_SECONDS = 0.5
"""How long an answer waits for room before it brings its embeddings along."""

_PARAM = "embeddings"

log = logging.getLogger(__name__)


class EncodeObserver(Protocol):
    """Who counts what is encoded for other replicas, and held for them."""

    def encoded(self, images: int, seconds: float) -> None:
        """The images of one request."""

    def holds(self, answers: int, size: int) -> None:
        """So many answers wait now to be read, with embeddings of `size` bytes in all."""


class EmbeddingRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An encoded image, the embeddings perhaps elsewhere."""

    text: str
    rows: int
    dtype: Literal["float32", "bfloat16", "float16"]
    size: int
    """Bytes of the embeddings."""
    grid: tuple[int, int, int] = (0, 0, 0)
    data: bytes = b""
    """The embeddings, if the answer has no offers."""


class Embeddings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of /encode. With offers the embeddings lie one after the other from `offset` of the replica's arena."""

    version: int
    images: tuple[EmbeddingRef, ...]
    offers: tuple[Offer, ...] = ()
    offset: int = 0
    digest: bytes = b""
    """BLAKE3 of all embeddings; with offers only."""


_embeddings = msgspec.msgpack.Decoder(Embeddings)


def encode_info(model_name: str, backend: str, info: EncoderInfo) -> internal.EncodeInfo:
    """What replicas have to have in common to use each other's embeddings."""
    return internal.EncodeInfo(internal.VERSION, model_name, backend, **msgspec.structs.asdict(info))


def decode_embeddings(data: bytes) -> Embeddings:
    """Raises InvalidRequest for what is no answer of this version, or says two things of one image."""
    found = handoff.decode_bounded(_embeddings, data, handoff.MAX_BYTES, "embeddings", _PARAM)
    if found.version != handoff.VERSION:
        raise InvalidRequest(
            f"the embeddings have version {found.version}; this replica reads version {handoff.VERSION}", _PARAM
        )
    for ref in found.images:
        if min(ref.rows, ref.size, *ref.grid) < 0 or len(ref.data) != (0 if found.offers else ref.size):
            raise InvalidRequest("the embeddings are not as long as they say", _PARAM)
    return found


def open_arena(method: str, port: int = 0) -> Arena | None:
    """None where nothing can be moved: embeddings then come within answers, whatever their size."""
    by: MethodName = "auto" if method in ("", "cuda_ipc") else method  # type: ignore[assignment]
    try:
        return Arena(ARENA_BYTES, by, port)
    except TransferError as error:
        log.warning("embeddings of images come within answers: %s", error)
        return None


class EmbeddingStore:
    """What an encode replica holds for others. `inline_bytes`: answers with no more have their embeddings within them."""

    def __init__(self, arena: Arena | None, inline_bytes: int, observer: EncodeObserver) -> None:
        self._arena = arena
        self._inline_bytes = inline_bytes
        self._observer = observer

    async def put(self, images: Sequence[EncodedImage], inline: bool) -> tuple[bytes, Place | None]:
        """The answer, as bytes, and what has to be freed once it is read. Raises QueueFull if there is no room for it anywhere."""
        parts = [readable(image.data) for image in images]
        size = sum(map(len, parts))
        place = None
        if self._arena is not None and not inline and size > self._inline_bytes:
            place = await self._arena.take(size, ROOM_SECONDS)
        if place is None or self._arena is None:
            if size > handoff.MAX_BYTES - (1 << 20):
                raise QueueFull(f"there is no room for embeddings of {size} bytes")
            refs = tuple(_ref(image, bytes(part)) for image, part in zip(images, parts, strict=True))
            return _encoded(Embeddings(version=handoff.VERSION, images=refs)), None
        self._count(self._arena)
        digest = await self._written(self._arena, place, parts)
        refs = tuple(_ref(image) for image in images)
        found = Embeddings(
            version=handoff.VERSION, images=refs, offers=self._arena.offers, offset=place.offset, digest=digest
        )
        return _encoded(found), place

    def free(self, place: Place) -> None:
        assert self._arena is not None
        self._arena.free(place)
        self._count(self._arena)

    async def close(self) -> None:
        if self._arena is not None:
            await self._arena.close()

    def _count(self, arena: Arena) -> None:
        taken = arena.taken
        self._observer.holds(len(taken), sum(place.size for place in taken))

    async def _written(self, arena: Arena, place: Place, parts: Sequence[bytes | memoryview]) -> bytes:
        """Copy in a thread, which holds the place for as long as it writes, cancelled or not."""

        def write() -> bytes:
            arena.write(place, parts)
            return _digest(parts)

        writing = asyncio.ensure_future(asyncio.to_thread(write))
        try:
            return await asyncio.shield(writing)
        except BaseException:
            writing.add_done_callback(lambda _: self.free(place))
            raise


async def fetch(found: Embeddings, arena: Arena | None, seconds: float) -> list[EncodedImage]:
    """The images of an answer, their embeddings here. Raises TransferError."""
    parts: list[Data] = [ref.data for ref in found.images]
    if found.offers:
        if arena is None:
            raise TransferError("this replica reads nothing by transfer")
        parts = await arena.read(found.offers, found.offset, [ref.size for ref in found.images], seconds)
        if await asyncio.to_thread(_digest, [readable(part) for part in parts]) != found.digest:
            raise TransferError("they were given up before they had been read")
    return [
        EncodedImage(text=ref.text, rows=ref.rows, data=part, dtype=ref.dtype, grid=ref.grid)
        for ref, part in zip(found.images, parts, strict=True)
    ]


def check_images(images: Sequence[EmbeddingRef], expected: int, hidden_size: int) -> None:
    """Raises InvalidRequest unless there is one for each image that was sent, with whole rows."""
    if len(images) != expected:
        raise InvalidRequest(f"there are embeddings for {len(images)} images, not for {expected}", _PARAM)
    if any(ref.size != ref.rows * hidden_size * ITEM_BYTES[ref.dtype] for ref in images):
        raise InvalidRequest(f"the embeddings are no rows of {hidden_size}", _PARAM)


_encoded = msgspec.msgpack.Encoder().encode


def _ref(image: EncodedImage, data: bytes = b"") -> EmbeddingRef:
    return EmbeddingRef(
        text=image.text, rows=image.rows, dtype=image.dtype, size=len(image.data), grid=image.grid, data=data
    )


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    hashed = blake3()
    for part in parts:
        hashed.update(part)
    return hashed.digest()
