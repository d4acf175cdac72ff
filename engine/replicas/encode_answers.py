"""The answer of `/encode`: its codec, the service that makes it, and the memory where embeddings wait for a transfer.

What was read is checked against a digest, so that no clock has to say whether the memory still held the same.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from engine.encoder import Encoded, Encoder, EncoderInfo
from engine.errors import InvalidRequest, QueueFull
from engine.kit import handoff
from engine.kit.work import NATIVE
from engine.media import ITEM_BYTES, EncodedMedia, Encoding, MediaInput, RemoteRows
from engine.transfer.arena import Arena, Place
from engine.transfer.base import Offer, TransferError
from engine.transfer.process_id import process_domain
from engine.transfer.shared_bytes import readable
from engine.transfer.transfers import MethodName
from protocol import internal

ARENA_BYTES = 1 << 30
"""Maximum bytes of embeddings that wait to be read, or are being read, at one time."""
ROOM_SECONDS = 0.5
"""Seconds that an answer waits for shared memory before it is sent with its embeddings inside."""
_PARAM = "embeddings"

log = logging.getLogger(__name__)


class EncodeObserver(Protocol):
    """Counts what is encoded for other replicas, and what is held for them."""

    def encoded(self, images: int, seconds: float) -> None:
        """The images of one request have been encoded."""

    def holds(self, answers: int, size: int) -> None:
        """Note the number of answers that wait to be read, and the total `size` of their embeddings in bytes."""


class EncodeAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of /encode: encoded files, or the encoding of a whole prompt.

    With offers, the embeddings of the files lie one after the other from `offset` of the replica's arena; without, they
    are in `media`. Those that are remote do neither.
    """

    version: int
    media: tuple[EncodedMedia, ...] = ()
    sizes: tuple[int, ...] = ()
    """Bytes of the embeddings of each, 0 for remote ones."""
    offers: tuple[Offer, ...] = ()
    offset: int = 0
    digest: bytes = b""
    """BLAKE3 of all embeddings; with offers only."""
    encoding: Encoding | None = None


class HeldEmbeddings(NamedTuple):
    """Embeddings that one answer holds for its reader."""

    place: Place | None
    """Their place in the arena."""
    rows: tuple[RemoteRows, ...] = ()
    """Those that stay with the encoder."""


_answers = msgspec.msgpack.Decoder(EncodeAnswer)


def encode_info(model_name: str, backend: str, info: EncoderInfo) -> internal.EncodeInfo:
    """Return what replicas must have in common to use each other's embeddings."""
    return internal.EncodeInfo(internal.VERSION, model_name, backend, **msgspec.structs.asdict(info))


def decode_answer(data: bytes) -> EncodeAnswer:
    """Decode an answer. Raises InvalidRequest for bytes that are not an answer of this version, or contradict
    themselves."""
    found = handoff.decode_bounded(_answers, data, handoff.MAX_BYTES, "embeddings", _PARAM)
    handoff.check_version(found.version, "embeddings")
    if found.encoding is not None:
        handoff.check_version(found.encoding.version, "encoding")
    if len(found.sizes) != len(found.media):
        raise InvalidRequest("the embeddings are not as many as they say", _PARAM)
    for media, size in zip(found.media, found.sizes, strict=True):
        if min(media.rows, size, *media.grid) < 0 or len(media.data) != (0 if found.offers else size):
            raise InvalidRequest("the embeddings are not as long as they say", _PARAM)
    return found


def open_arena(method: str, port: int = 0) -> Arena | None:
    """Return None if no method of transfer works: embeddings are then sent within answers, whatever their size."""
    by: MethodName = "auto" if method in ("", "cuda_ipc") else method  # type: ignore[assignment]
    try:
        return Arena(ARENA_BYTES, by, port)
    except TransferError as error:
        log.warning("embeddings are sent within answers: %s", error)
        return None


class EmbeddingStore:
    """Embeddings that an encode replica holds for others.

    Answers with at most `inline_bytes` contain theirs, all do without an arena.
    """

    def __init__(self, arena: Arena | None, inline_bytes: int, observer: EncodeObserver) -> None:
        self._arena = arena
        self._inline_bytes = inline_bytes
        self._observer = observer
        self._rows: list[tuple[RemoteRows, ...]] = []

    @property
    def held(self) -> list[int]:
        """Bytes of the embeddings of each answer that waits to be read."""
        places = [] if self._arena is None else self._arena.taken
        return [place.size for place in places] + [sum(each.size for each in rows) for rows in self._rows]

    async def put(self, encoded: Encoded, inline: bool) -> tuple[bytes, HeldEmbeddings | None]:
        """Return the answer, as bytes, and what to free once it has been read.

        Raises QueueFull if there is no room for it.
        """
        if isinstance(encoded, Encoding):
            return handoff.encode(EncodeAnswer(version=handoff.VERSION, encoding=encoded)), None
        parts = [readable(media.data) for media in encoded]
        sizes = tuple(map(len, parts))
        place = None
        if self._arena is not None and not inline and sum(sizes) > self._inline_bytes:
            place = await self._arena.take(sum(sizes), ROOM_SECONDS)
        if place is None or self._arena is None:
            if sum(sizes) > handoff.MAX_BYTES - (1 << 20):
                raise QueueFull(f"there is no room for embeddings of {sum(sizes)} bytes")
            whole = tuple(replace(media, data=bytes(part)) for media, part in zip(encoded, parts, strict=True))
            return handoff.encode(EncodeAnswer(version=handoff.VERSION, media=whole, sizes=sizes)), self._hold(encoded)
        self._count()
        digest = await self._written(self._arena, place, parts)
        found = EncodeAnswer(
            version=handoff.VERSION,
            media=tuple(replace(media, data=b"") for media in encoded),
            sizes=sizes,
            offers=self._arena.offers,
            offset=place.offset,
            digest=digest,
        )
        return handoff.encode(found), self._hold(encoded, place)

    def free(self, held: HeldEmbeddings) -> None:
        if held.place is not None:
            assert self._arena is not None
            self._arena.free(held.place)
        if held.rows:
            self._rows.remove(held.rows)
        self._count()

    def trim(self) -> None:
        """Give memory that is not in use back."""
        if self._arena is not None:
            self._arena.trim()

    async def close(self) -> None:
        if self._arena is not None:
            await self._arena.close()

    def _hold(self, encoded: Sequence[EncodedMedia], place: Place | None = None) -> HeldEmbeddings | None:
        held = HeldEmbeddings(place, tuple(media.remote for media in encoded if media.remote is not None))
        if held.rows:
            self._rows.append(held.rows)
            self._count()
        return held if any(held) else None

    def _count(self) -> None:
        self._observer.holds(len(self.held), sum(self.held))

    async def _written(self, arena: Arena, place: Place, parts: Sequence[bytes | memoryview]) -> bytes:
        """Copy in a thread. Cancelled meanwhile, free the place once the thread has finished."""

        def write() -> bytes:
            arena.write(place, parts)
            return _digest(parts)

        writing = asyncio.ensure_future(NATIVE.run(write))
        try:
            return await asyncio.shield(writing)
        except BaseException:
            writing.add_done_callback(lambda _: self.free(HeldEmbeddings(place)))
            raise


class EncodeService:
    """Encodes for other replicas by `encoder`, which has started."""

    def __init__(
        self, model_name: str, backend: str, encoder: Encoder, store: EmbeddingStore, observer: EncodeObserver
    ) -> None:
        self.info = encode_info(model_name, backend, encoder.info)
        self.served = 0
        """Number of requests answered."""
        self.waiting = 0
        """Number of requests whose images are not encoded yet."""
        self.encoder = encoder
        self.store = store
        self._observer = observer

    @property
    def healthy(self) -> bool:
        return self.encoder.healthy

    async def encode(
        self, request: internal.EncodeRequest, media: Sequence[MediaInput]
    ) -> tuple[bytes, HeldEmbeddings | None]:
        """Return the answer, and what `free` must be called with once it has been read.

        Raises as `Encoder.encode` does.
        """
        if request.reader != process_domain():  # it cannot read the encoder's memory
            media = [replace(file, stay=False) for file in media]
        if self.encoder.info.needs_prompt and not request.prompt:
            raise InvalidRequest("a prompt is needed: this replica encodes the images of a whole prompt", "prompt")
        if any(file.kept is not None for file in media):
            encoded = await self.encoder.encode(media)
        else:
            with self.counting(len(media)):
                encoded = await self.encoder.encode(media, request.prompt)
        return await self.store.put(encoded, request.inline)

    def free(self, held: HeldEmbeddings) -> None:
        self.store.free(held)
        for rows in held.rows:
            self.encoder.release(rows)

    @contextmanager
    def counting(self, images: int) -> Iterator[None]:
        """Count a request while this many of its images are encoded, and again once they are."""
        started = time.perf_counter()
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
        self.served += 1
        self._observer.encoded(images, time.perf_counter() - started)

    async def close(self) -> None:
        await self.encoder.close()
        await self.store.close()


async def fetch(found: EncodeAnswer, arena: Arena | None, seconds: float) -> list[EncodedMedia]:
    """Return the media of an answer, with their embeddings, read into `arena` if they are elsewhere.

    Raises TransferError.
    """
    if not found.offers:
        return [*found.media]
    if arena is None:
        raise TransferError("this replica reads nothing by transfer")
    parts = await arena.read(found.offers, found.offset, found.sizes, seconds)
    if await NATIVE.run(lambda: _digest([readable(part) for part in parts])) != found.digest:
        raise TransferError("they were given up before they had been read")
    return [replace(media, data=part) for media, part in zip(found.media, parts, strict=True)]


def check_answer(found: EncodeAnswer, count: int, hidden_size: int) -> None:
    """Raise InvalidRequest unless the answer has whole rows for each of `count` files or, if that is 0, an encoding."""
    if (found.encoding is None) != bool(count) or len(found.media) != count:
        raise InvalidRequest(f"there are embeddings for {len(found.media)} images, not for {count}", _PARAM)
    for media, here in zip(found.media, found.sizes, strict=True):
        size = here if media.remote is None else media.remote.size
        if size != media.rows * hidden_size * ITEM_BYTES[media.dtype]:
            raise InvalidRequest(f"the embeddings are not rows of {hidden_size}", _PARAM)


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    hashed = blake3()
    for part in parts:
        hashed.update(part)
    return hashed.digest()
