"""An `Encoder` that has images encoded by other replicas, and by one here where there is one and they do not.

Images go to the replica with the fewest to encode, in batches: `multimodal/media/vision.py` asks for each by itself, others may ask for several.
What a replica's answer does not bring along is read from its memory before the answer is closed.
"""

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from engine.encoder import EncodedImage, Encoder, EncoderInfo, ImageInput
from engine.errors import EngineError, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.kit.tasks import all_of
from engine.process.attachments import detach_images
from engine.replicas.ask import ENCODE, ENCODE_PROMPT, RemoteAnswer
from engine.replicas.client import Header
from engine.replicas.encode_answers import Embeddings, check_images, encode_info, fetch
from engine.replicas.remote import RemoteObserver, RemotePool, RemoteReplica, is_final
from engine.transfer.arena import Arena
from engine.transfer.base import TransferError
from engine.types import Encoding
from protocol.internal import MOST_IMAGE_BYTES, MOST_IMAGES, VERSION, EncodeInfo, EncodeRequest, pieces

_LOOK_SECONDS = 0.05
T = TypeVar("T")

log = logging.getLogger(__name__)


class EncodeReplica(RemoteReplica[EncodeInfo, Embeddings]):
    """An encode replica. Once its memory could not be read, embeddings are to come within its answers, until it has been away."""

    def __init__(self, url: str, headers: Sequence[Header], observer: RemoteObserver) -> None:
        super().__init__(url, ENCODE, headers, observer)
        self.inline = False

    def set_unready(self, error: EngineError) -> None:
        super().set_unready(error)
        self.inline = False


class EncodePool(RemotePool[EncodeReplica]):
    """Encode replicas, asked for embeddings of images. Those that are not in their answers are read into `arena`."""

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        attempts: int,
        observer: RemoteObserver,
        arena: Arena | None,
        seconds: float,
    ) -> None:
        """`seconds`: how long reading may take."""
        super().__init__(urls, secret, attempts, observer, "encode")
        self._arena = arena
        self._seconds = seconds

    def found(self, model_name: str, backend: str) -> EncodeInfo | None:
        """What the first peer that answers encodes with, of those with this model."""
        wanted = (VERSION, model_name, backend)
        infos = (replica.info for replica in self.replicas if replica.available and replica.info is not None)
        return next((info for info in infos if (info.version, info.model, info.backend) == wanted), None)

    async def encode(self, images: Sequence[ImageInput], mine: EncodeInfo) -> list[EncodedImage]:
        """A batch. Raises as `Encoder.encode` does, NoPeer if nobody can be asked."""
        name = uuid.uuid4().hex

        async def ask(peer: EncodeReplica) -> list[EncodedImage]:
            if not (peer.inline or self._arena is None):
                try:
                    return await self._fetched(peer, _body(mine, images), name, len(images), mine)
                except TransferError as error:
                    log.warning(
                        "embeddings of encode replica %s cannot be read, and have to be sent: %s", peer.url, error
                    )
                    peer.inline = True
            try:
                return await self._fetched(peer, _body(mine, images, inline=True), name, len(images), mine)
            except TransferError as error:
                raise EngineUnavailable("an encode replica does not send its embeddings") from error

        return await self.try_in_turn(mine, name, lambda replica: replica.in_flight, ask)

    async def close(self) -> None:
        await super().close()
        if self._arena is not None:
            await self._arena.close()

    async def _fetched(
        self, peer: EncodeReplica, body: Sequence[bytes], name: str, count: int, mine: EncodeInfo
    ) -> list[EncodedImage]:
        """Raises TransferError too."""
        lease = await peer.ask(body, name, count)
        try:
            found = lease.handoff
            try:
                check_images(found.images, count, mine.hidden_size)
            except InvalidRequest as error:  # of the peer's making
                raise EngineUnavailable(f"an encode replica's answer is wrong: {error}") from error
            encoded = await fetch(found, self._arena, self._seconds)
            if not found.offers:
                await _at_end(lease)
            return encoded
        finally:
            lease.close()

    def _new(self, url: str) -> EncodeReplica:
        return EncodeReplica(url, self.headers, self.observer)


class EncoderPool:
    """Encodes by `peers` of the model `model_name` and, where none can, by `local`, if there is one. `backend` is that of this replica."""

    def __init__(self, peers: EncodePool, model_name: str, backend: str, local: Encoder | None) -> None:
        self._peers = peers
        self._model_name = model_name
        self._backend = backend
        self._local = local
        self._mine: EncodeInfo | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def info(self) -> EncoderInfo:
        mine = self._mine
        if mine is None:
            raise EngineNotReady("no encode replica has answered yet")
        return EncoderInfo(
            fingerprint=mine.fingerprint,
            placeholder=mine.placeholder,
            image_token_id=mine.image_token_id,
            hidden_size=mine.hidden_size,
            dtype=mine.dtype,
        )

    @property
    def healthy(self) -> bool:
        if self._closed or self._mine is None:
            return False
        return self._peers.healthy(self._mine) or (self._local is not None and self._local.healthy)

    @property
    def counts(self) -> tuple[int, int]:
        """Peers that are known, and those of them that answer."""
        return self._peers.counts

    async def start(self) -> None:
        """Without an encoder here, wait until a peer has said what it encodes with; later ones have to do it alike."""
        finding = asyncio.create_task(self._peers.start())
        try:
            if self._local is not None:
                await self._local.start()
            await finding
        finally:
            finding.cancel()
            await asyncio.wait({finding})
        if self._local is not None:
            self._mine = encode_info(self._model_name, self._backend, self._local.info)
            return
        while (mine := self._peers.found(self._model_name, self._backend)) is None:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(_LOOK_SECONDS)
        self._mine = mine

    async def encode(self, images: Sequence[ImageInput]) -> list[EncodedImage]:
        mine = self._mine
        if self._closed or mine is None:
            raise EngineNotReady("the encoder is starting or closing")
        batches = await self._run(all_of(self._batch(batch, mine) for batch in _batches(images)))
        return [image for batch in batches for image in batch]

    async def close(self) -> None:
        self._closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await self._peers.close()
        if self._local is not None:
            await self._local.close()

    async def _batch(self, images: Sequence[ImageInput], mine: EncodeInfo) -> list[EncodedImage]:
        try:
            return await self._peers.encode(images, mine)
        except EngineError as error:
            if self._local is None or is_final(error):
                raise
            log.info("%d images are encoded here: %s", len(images), error)
        self._peers.observer.computed_locally("no_peer")
        return await self._local.encode(images)

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. Closing ends it with an error, cancelling gives it up."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise EngineNotReady("the encoder is closing")
        return task.result()


class PromptEncodeReplica(RemoteReplica[EncodeInfo, Encoding]):
    """An encode replica of TensorRT-LLM."""


class PromptEncodePool(RemotePool[PromptEncodeReplica]):
    """Encode replicas of TensorRT-LLM."""

    def __init__(self, urls: Sequence[str], secret: str, attempts: int, observer: RemoteObserver) -> None:
        super().__init__(urls, secret, attempts, observer, "encode")

    async def encode(self, prompt: str, images: Sequence[ImageInput], mine: EncodeInfo) -> Encoding:
        """Raises as `PromptEncoder.encode` does, NoPeer if nobody can be asked."""
        name = uuid.uuid4().hex

        async def ask(peer: PromptEncodeReplica) -> Encoding:
            lease = await peer.ask(_body(mine, images, prompt=prompt), name, len(images))
            try:
                await _at_end(lease)
                return lease.handoff
            finally:
                lease.close()

        return await self.try_in_turn(mine, name, lambda replica: replica.in_flight, ask)

    def _new(self, url: str) -> PromptEncodeReplica:
        return PromptEncodeReplica(url, ENCODE_PROMPT, self.headers, self.observer)


class PromptEncoderPool:
    """A `PromptEncoder` by `peers` of the model `model_name`, which hand the embeddings over by means of their own."""

    def __init__(self, peers: PromptEncodePool, model_name: str) -> None:
        self._peers = peers
        self._mine = EncodeInfo(VERSION, model_name, "trtllm")

    @property
    def healthy(self) -> bool:
        return self._peers.healthy(self._mine)

    @property
    def counts(self) -> tuple[int, int]:
        """Peers that are known, and those of them that answer."""
        return self._peers.counts

    async def start(self) -> None:
        await self._peers.start()

    async def encode(self, prompt: str, images: Sequence[ImageInput]) -> Encoding:
        return await self._peers.encode(prompt, images, self._mine)

    async def close(self) -> None:
        await self._peers.close()


def _body(mine: EncodeInfo, images: Sequence[ImageInput], *, prompt: str = "", inline: bool = False) -> list[bytes]:
    bare, parts = detach_images(images)
    raw = msgspec.Raw(msgspec.msgpack.encode(bare))
    return pieces(EncodeRequest(VERSION, mine.model, raw, [*map(len, parts)], prompt, inline), parts)


def _batches(images: Sequence[ImageInput]) -> Iterator[list[ImageInput]]:
    """In order, each within what one request may have."""
    batch: list[ImageInput] = []
    size = 0
    for image in images:
        if batch and (len(batch) == MOST_IMAGES or size + len(image.data) > MOST_IMAGE_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(image)
        size += len(image.data)
    if batch:
        yield batch


async def _at_end(lease: RemoteAnswer[Any]) -> None:
    """Read the end of an answer that holds nothing, so that its connection can be used again."""
    try:
        async with asyncio.timeout(1.0):
            await lease.ended()
    except TimeoutError:
        return
