"""Images of chats for engines that take embeddings: from what requests name to expanded prompts and where the images are in them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine import trace
from engine.encoder import EncodedImage, Encoder, ImageInput
from engine.errors import InvalidRequest, QueueFull
from engine.kit.tasks import all_of
from engine.types import Image
from multimodal.errors import RequestError
from multimodal.media.cache import EmbeddingCache
from multimodal.media.embeddings import Embeddings
from multimodal.media.inflight import InFlight
from multimodal.media.keys import image_key
from multimodal.media.loader import MediaLoader
from multimodal.text.messages import Attachment, check_count
from multimodal.text.prompt import Prompt, Tokenise
from multimodal.text.tokenizer import Tokenizer

MOST_WAITING = 1 << 30
"""Bytes of image files that may wait to be encoded; one more is refused, as requests are when too many wait for the engine."""


@dataclass(frozen=True, slots=True)
class KeyedImage:
    """An encoded image and the key that names it in caches."""

    key: str
    encoded: EncodedImage


class Vision:
    """Has images encoded and puts them into prompts. The cache is in front of the encoder, which sees an image once, however many ask."""

    def __init__(
        self, encoder: Encoder, loader: MediaLoader, cache: EmbeddingCache, tokenizer: Tokenizer, max_images: int
    ) -> None:
        self._encoder = encoder
        self._loader = loader
        self._cache = cache
        self._tokenizer = tokenizer
        self._max_images = max_images
        self._encoding: InFlight[str, EncodedImage] = InFlight()
        self._waiting = 0

    @cached_property
    def marks(self) -> frozenset[str]:
        return frozenset({self._encoder.info.placeholder, self._image_token})

    async def prompt(self, text: str, attachments: Sequence[Attachment], tokenise: Tokenise, choices: int) -> Prompt:
        check_count(attachments, self._max_images)
        images = await all_of(self._load(attachment) for attachment in attachments)
        ids = await tokenise(self._expanded(text, images))
        return Prompt(ids, self._placed(ids, images))

    async def tokens(self, text: str, attachments: Sequence[Attachment], tokenise: Tokenise) -> list[int]:
        return (await self.prompt(text, attachments, tokenise, 1)).ids

    async def aclose(self) -> None:
        await self._loader.aclose()

    @cached_property
    def _image_token(self) -> str:
        return self._tokenizer.decode([self._encoder.info.image_token_id])

    async def _load(self, attachment: Attachment) -> KeyedImage:
        """Fetched, then from the cache or encoded."""
        with trace.span("fetch"):
            loaded = await self._loader.load(attachment.url, attachment.param)
        key = await asyncio.to_thread(image_key, loaded.data, self._encoder.info.fingerprint, attachment.detail)
        if (known := self._cache.get(key)) is not None:
            return KeyedImage(key, known)
        if loaded.embeddings is not None:
            return KeyedImage(key, self._given(loaded.embeddings))
        image = ImageInput(loaded.data, attachment.detail)
        try:
            with trace.span("encode"):
                return KeyedImage(key, await self._encoding.do(key, lambda: self._encode(key, image)))
        except InvalidRequest as error:
            raise RequestError(str(error), attachment.param, "invalid_image") from error

    async def _encode(self, key: str, image: ImageInput) -> EncodedImage:
        size = len(image.data)
        if self._waiting and self._waiting + size > MOST_WAITING:
            raise QueueFull("too many images wait to be encoded already")
        self._waiting += size
        try:
            (encoded,) = await self._encoder.encode([image])
        finally:
            self._waiting -= size
        self._cache.put(key, encoded)
        return encoded

    def _given(self, embeddings: Embeddings) -> EncodedImage:
        """Embeddings that the request brought: as many image tokens as they have rows."""
        text = self._encoder.info.placeholder.replace(self._image_token, self._image_token * embeddings.rows)
        return EncodedImage(
            text=text, rows=embeddings.rows, data=embeddings.data, dtype=embeddings.dtype, grid=embeddings.grid
        )

    def _expanded(self, text: str, images: Sequence[KeyedImage]) -> str:
        """The prompt with every placeholder replaced by what its image expands to."""
        parts = text.split(self._encoder.info.placeholder)
        if len(parts) != len(images) + 1:
            raise RequestError(
                "The chat template does not show every image of these messages.", "messages", "unsupported_content"
            )
        return "".join(part + image.encoded.text for part, image in zip(parts, images, strict=False)) + parts[-1]

    def _placed(self, ids: Sequence[int], images: Sequence[KeyedImage]) -> tuple[Image, ...]:
        """Where the images are in the tokens of an expanded prompt: each from its first image token to its last."""
        token = self._encoder.info.image_token_id
        places = [position for position, token_id in enumerate(ids) if token_id == token]
        if len(places) != sum(image.encoded.rows for image in images):
            raise RequestError(
                "The images are not whole in the prompt: it cannot be truncated.", "truncate_prompt_tokens"
            )
        placed, row = [], 0
        for key, encoded in ((image.key, image.encoded) for image in images):
            start, last = places[row], places[row + encoded.rows - 1]
            row += encoded.rows
            length, rows, dtype, data = last - start + 1, encoded.rows, encoded.dtype, encoded.data
            placed.append(
                Image(key=key, start=start, length=length, rows=rows, dtype=dtype, data=data, grid=encoded.grid)
            )
        return tuple(placed)
