"""Encode replicas on real sockets in this process, an encoder before them, and images that are none."""

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from engine.encoder import Encoder
from engine.fake.encoder import FakeEncoder
from engine.media import EncodedMedia, MediaInput, detach_media
from engine.replicas.ask import ENCODE, RemoteAnswer, ask
from engine.replicas.client import ReplicaClient
from engine.replicas.encode_answers import EncodeAnswer
from engine.replicas.encoders import EncodePool, EncoderPool
from engine.transfer.arena import Arena
from protocol.internal import VERSION, EncodeRequest, pieces
from tests.support.disaggregated import BEARER, SECRET, Seen

ARENA_BYTES = 1 << 22
SIZE = 16 * 64 * 4
"""Bytes of a fake image's embeddings."""


def image(index: int, size: int = 100, detail: Any = "auto") -> MediaInput:
    return MediaInput(b"\x89PNG\r\n\x1a\n" + str(index).zfill(size).encode(), detail)


def body_of(images: Sequence[MediaInput], version: int = VERSION, model: str = "fake", **fields: Any) -> bytes:
    bare, parts = detach_media(images)
    raw = msgspec.Raw(msgspec.msgpack.encode(bare))
    return b"".join(pieces(EncodeRequest(version, model, raw, [*map(len, parts)], **fields), parts))


async def expected(images: Sequence[MediaInput]) -> list[EncodedMedia]:
    """What one encoder makes of them."""
    encoder = FakeEncoder()
    await encoder.start()
    return await encoder.encode(images)


@asynccontextmanager
async def leased(url: str, images: Sequence[MediaInput], **fields: Any) -> AsyncIterator[RemoteAnswer[EncodeAnswer]]:
    """What a replica hands over, held until the end."""
    headers = [(name.encode(), value.encode()) for name, value in BEARER.items()]
    lease = await ask(ReplicaClient(url), ENCODE, [body_of(images, **fields)], headers)
    try:
        yield lease
    finally:
        lease.close()


@asynccontextmanager
async def arena(method: Any = "auto", size: int = ARENA_BYTES) -> AsyncIterator[Arena]:
    made = Arena(size, method)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def encoder_of(
    urls: Sequence[str],
    *,
    local: Encoder | None = None,
    method: str = "auto",
    start: bool = True,
    model: tuple[str, str] = ("fake", "fake"),
) -> AsyncIterator[tuple[EncoderPool, EncodePool, Seen]]:
    """An encoder that has images encoded by replicas. It reads by `method`, if any; `model` is name and backend."""
    seen = Seen()
    into = Arena(ARENA_BYTES, method) if method else None  # type: ignore[arg-type]
    peers = EncodePool(urls, SECRET, 3, seen, into, 5.0)
    pool = EncoderPool(peers, *model, local)
    try:
        if start:
            await pool.start()
        yield pool, peers, seen
    finally:
        await pool.close()
        assert into is None or not into.taken


def pages(count: int, start: int = 0) -> list[MediaInput]:
    """Different images."""
    return [image(index) for index in itertools.islice(itertools.count(start), count)]
