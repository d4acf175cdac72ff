"""What `/encode` serves to other replicas: an encoder, and the memory that holds its embeddings until they have been
read.
"""

import time
from collections.abc import Sequence

from engine.encoder import Encoder
from engine.errors import InvalidRequest
from engine.media import MediaInput
from engine.replicas.encode_answers import EmbeddingStore, EncodeObserver, encode_info
from engine.transfer.arena import Place
from protocol.internal import EncodeRequest


class EncodeService:
    """Encodes for other replicas by `encoder`, which has started."""

    def __init__(
        self, model_name: str, backend: str, encoder: Encoder, store: EmbeddingStore, observer: EncodeObserver
    ) -> None:
        self.info = encode_info(model_name, backend, encoder.info)
        self.served = 0
        """Number of requests answered."""
        self.encoder = encoder
        self._store = store
        self._observer = observer

    @property
    def healthy(self) -> bool:
        return self.encoder.healthy

    @property
    def held(self) -> list[int]:
        """Bytes of the embeddings of each answer that waits to be read."""
        return self._store.held

    async def encode(self, request: EncodeRequest, media: Sequence[MediaInput]) -> tuple[bytes, Place | None]:
        """Return the answer and what `free` has to be called with once it has been read.

        Raises as `Encoder.encode` does.
        """
        if self.encoder.info.needs_prompt and not request.prompt:
            raise InvalidRequest("a prompt is needed: this replica encodes the images of a whole prompt", "prompt")
        started = time.perf_counter()
        encoded = await self.encoder.encode(media, request.prompt)
        self.served += 1
        self._observer.encoded(len(media), time.perf_counter() - started)
        return await self._store.put(encoded, request.inline)

    def free(self, place: Place) -> None:
        self._store.free(place)

    async def close(self) -> None:
        await self.encoder.close()
        await self._store.close()
