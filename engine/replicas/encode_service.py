"""What an encode replica does for others, by whatever encodes there: /encode knows no more of it than this."""

import time
from collections.abc import Sequence
from typing import Protocol

from engine import handoff
from engine.encoder import Encoder, PromptEncoder
from engine.errors import InvalidRequest
from engine.media import MediaInput
from engine.replicas.encode_answers import EmbeddingStore, EncodeObserver, encode_info
from engine.transfer.arena import Place
from protocol.internal import VERSION, EncodeInfo, EncodeRequest


class EncodeService(Protocol):
    """Encodes for other replicas."""

    @property
    def info(self) -> EncodeInfo: ...

    @property
    def healthy(self) -> bool: ...

    @property
    def served(self) -> int:
        """Requests that were answered."""
        ...

    async def encode(self, request: EncodeRequest, images: Sequence[MediaInput]) -> tuple[bytes, Place | None]:
        """The answer, as bytes, and what is to be freed once it is read. Raises as `Encoder` does."""
        ...

    def free(self, place: Place) -> None: ...

    async def close(self) -> None: ...


class ImageService:
    """By an `Encoder`, which has started: each image for itself."""

    def __init__(
        self, model_name: str, backend: str, encoder: Encoder, store: EmbeddingStore, observer: EncodeObserver
    ) -> None:
        self.info = encode_info(model_name, backend, encoder.info)
        self._encoder = encoder
        self._store = store
        self._observer = observer
        self.served = 0

    @property
    def healthy(self) -> bool:
        return self._encoder.healthy

    async def encode(self, request: EncodeRequest, images: Sequence[MediaInput]) -> tuple[bytes, Place | None]:
        started = time.perf_counter()
        encoded = await self._encoder.encode(images)
        self.served += 1
        self._observer.encoded(len(images), time.perf_counter() - started)
        return await self._store.put(encoded, request.inline)

    def free(self, place: Place) -> None:
        self._store.free(place)

    async def close(self) -> None:
        await self._encoder.close()
        await self._store.close()


class PromptService:
    """By a `PromptEncoder`, which has started: a prompt's images together. It moves the embeddings by means of its own."""

    def __init__(self, model_name: str, backend: str, encoder: PromptEncoder, observer: EncodeObserver) -> None:
        self.info = EncodeInfo(VERSION, model_name, backend)
        self._encoder = encoder
        self._observer = observer
        self.served = 0

    @property
    def healthy(self) -> bool:
        return self._encoder.healthy

    async def encode(self, request: EncodeRequest, images: Sequence[MediaInput]) -> tuple[bytes, Place | None]:
        if not request.prompt:
            raise InvalidRequest("a prompt is needed: this replica encodes the images of a whole prompt", "prompt")
        started = time.perf_counter()
        encoding = await self._encoder.encode(request.prompt, images)
        self.served += 1
        self._observer.encoded(len(images), time.perf_counter() - started)
        return handoff.encode(encoding), None

    def free(self, place: Place) -> None:
        raise AssertionError("nothing is held here")

    async def close(self) -> None:
        await self._encoder.close()
