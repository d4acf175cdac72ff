"""Images of Dynamo's requests. The frontend sends their URLs, and token ids in which a placeholder stands for each.

An encode worker of the graph, or without one a prefill worker, loads and encodes them; the result travels with the
request, through the frontend, to the workers that need it. It contains small embeddings; large ones wait in the memory
of the worker that made them. A worker that cannot read them encodes the images itself.
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from engine.errors import InvalidRequest
from engine.kit.handoff import MAX_BYTES, decode_bounded, encode
from engine.kit.tasks import cancel
from engine.replicas.encode_answers import (
    EmbeddingStore,
    HeldEmbeddings,
    check_answer,
    decode_answer,
    encode_info,
    fetch,
)
from engine.transfer.arena import Arena
from engine.transfer.base import TransferError
from multimodal.media.prompts import BackendPrompts, EncodedPrompts, Keyed
from multimodal.request import MediaRef
from multimodal.text.prompts import Prompt
from protocol.dynamo import DynamoRequest
from protocol.internal import EncodeInfo
from routers.dynamo.convert import image_refs
from routers.dynamo.handoffs import Claim

ENCODING = "trellis_encoding"
"""The field of `encoder_result`, and of `disaggregated_params`, that holds encoded images, in base64."""

log = logging.getLogger(__name__)


class EncodedImages(Claim, frozen=True, kw_only=True):
    """Encoded images of a request, and the lease of their embeddings, if these wait in memory."""

    info: EncodeInfo
    """Facts of the encoder that the reader's must share."""
    keys: tuple[str, ...]
    """Keys of the images in caches."""
    answer: bytes
    """An `EncodeAnswer`."""


_encodings = msgspec.msgpack.Decoder(EncodedImages)


class OfferedEmbeddings:
    """Embeddings of images that other workers of the graph may read, each until a worker reports that it has read them
    or their time is over.
    """

    def __init__(
        self, store: EmbeddingStore, seconds: float, info: EncodeInfo, endpoint: str, instance: Callable[[], int]
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._info = info
        self._endpoint = endpoint
        self._instance = instance
        self._held: dict[str, tuple[HeldEmbeddings, asyncio.TimerHandle]] = {}

    async def offer(self, media: Sequence[Keyed]) -> dict[str, str]:
        """Return encoded images as they travel with a request."""
        answer, held = await self._store.put([encoded for _, encoded in media], inline=False)
        lease = ""
        if held is not None:
            lease = uuid4().hex
            timer = asyncio.get_running_loop().call_later(self._seconds, self.free, lease)
            self._held[lease] = held, timer
        encoding = EncodedImages(
            info=self._info,
            keys=tuple(key for key, _ in media),
            answer=answer,
            endpoint=self._endpoint,
            instance=self._instance(),
            lease=lease,
        )
        return {ENCODING: base64.b64encode(encode(encoding)).decode()}

    def free(self, lease: str) -> bool:
        """Free embeddings. Return whether there were any under this lease."""
        if (found := self._held.pop(lease, None)) is None:
            return False
        held, timer = found
        timer.cancel()
        self._store.free(held)
        return True

    def close(self) -> None:
        for lease in list(self._held):
            self.free(lease)


class GraphImages:
    """Puts the images of requests into their prompts: read from where they were encoded, or encoded here. Workers that
    share `model_name` and the encoder can read each other's.

    `give_up` tells the worker that holds embeddings that they have been read, if no other worker needs them.
    """

    def __init__(
        self,
        images: EncodedPrompts,
        model_name: str,
        backend: str,
        arena: Arena | None,
        seconds: float,
        *,
        give_up: Callable[[Claim], Awaitable[None]] | None,
    ) -> None:
        self.info = encode_info(model_name, backend, images.encoder.info)
        self._images = images
        self._arena = arena
        self._seconds = seconds
        self._give_up = give_up
        self._freeing: set[asyncio.Task[None]] = set()

    async def prompt(self, asked: DynamoRequest) -> tuple[Prompt, list[Keyed]]:
        """Return the prompt of a request that has images, and those of them that were encoded here. Raises
        RequestError, and what loading and encoding raises.
        """
        refs = image_refs(asked)
        for found in _offers(asked):
            if (media := await self._read(found, len(refs))) is not None:
                return self._images.placed(asked.token_ids, media), []
        media = await self.load(refs)
        return self._images.placed(asked.token_ids, media), media

    async def load(self, refs: Sequence[MediaRef]) -> list[Keyed]:
        return await self._images.load(refs)

    async def close(self) -> None:
        await cancel(self._freeing)
        if self._arena is not None:
            await self._arena.close()

    async def _read(self, found: object, count: int) -> list[Keyed] | None:
        """Return the images that another worker has encoded; None if they cannot be used."""
        try:
            encoding = decode_bounded(_encodings, base64.b64decode(found, validate=True), MAX_BYTES, "images", "image")  # type: ignore[arg-type]
            if encoding.info != self.info:
                raise InvalidRequest(f"the worker encodes with {encoding.info}, this one with {self.info}")
            media = await self._media(encoding, count)
        except (binascii.Error, TypeError, ValueError, InvalidRequest, TransferError) as error:
            log.warning("images are encoded here: what another worker has encoded cannot be read: %s", error)
            return None
        if self._give_up is not None and encoding.lease:
            task = asyncio.create_task(_given_up(encoding, self._give_up))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)
        return media

    async def _media(self, encoding: EncodedImages, count: int) -> list[Keyed]:
        answer = decode_answer(encoding.answer)
        check_answer(answer, count, self.info.hidden_size)
        if len(encoding.keys) != count:
            raise InvalidRequest(f"it has {len(encoding.keys)} keys, for {count} images")
        cache = self._images.cache
        known = [cache.get(key) for key in encoding.keys]
        media = [each for each in known if each is not None]
        if len(media) != count:
            media = await fetch(answer, self._arena, self._seconds)
            for key, encoded in zip(encoding.keys, media, strict=True):
                cache.put(key, encoded)
        return [*zip(encoding.keys, media, strict=True)]


async def _given_up(claim: Claim, give_up: Callable[[Claim], Awaitable[None]]) -> None:
    try:
        await give_up(claim)
    except Exception as error:  # of any kind: they are freed when their time is over
        log.debug("embeddings could not be given up: %s", error)


def _offers(asked: DynamoRequest) -> list[object]:
    """Return other workers' encodings of the request's images, the newest first."""
    params: Mapping[str, Any] = asked.prefill_result.disaggregated_params if asked.prefill_result is not None else {}
    found = [params.get(ENCODING), (asked.encoder_result or {}).get(ENCODING)]
    return [each for each in found if each is not None]


class BackendImages:
    """Passes images to a backend that expands prompts and encodes by itself (TensorRT-LLM)."""

    def __init__(self, images: BackendPrompts) -> None:
        self._images = images

    async def prompt(self, asked: DynamoRequest) -> tuple[Prompt, list[Keyed]]:
        """Return the prompt of a request that has images; none of them are encoded here."""
        text = asked.extra_args.formatted_prompt if asked.extra_args is not None else None
        if text is None:
            raise InvalidRequest("the frontend does not say how it has rendered the chat", "messages")
        return await self._images.given(text, asked.token_ids, image_refs(asked)), []

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
