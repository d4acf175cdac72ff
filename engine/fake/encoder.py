"""The encoder without a model: deterministic and fast. A file becomes ROWS tokens, with embeddings from its hash;
a video as many for each of the frames that are asked for."""

import asyncio
from collections.abc import Sequence

from blake3 import blake3

from engine.encoder import EncoderInfo
from engine.errors import EngineNotReady, InvalidRequest
from engine.media import EncodedMedia, MediaInput, RemoteRows

PLACEHOLDER = "<image>"
IMAGE_TOKEN_ID = 259
"""Token of the byte tokenizer (`multimodal/text/tokenizer.py`)."""
ROWS, HIDDEN_SIZE = 16, 64
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")


class FakeEncoder:
    """Encodes each file in `seconds` into `rows` tokens."""

    def __init__(self, seconds: float = 0.0, rows: int = ROWS) -> None:
        self._seconds = seconds
        self._rows = rows
        self._started = False
        self._closed = False
        self._running: set[asyncio.Task[None]] = set()
        self.encoded = 0
        """Number of files encoded."""

    @property
    def info(self) -> EncoderInfo:
        if not self._started:
            raise EngineNotReady("the encoder has not started")
        return EncoderInfo(
            fingerprint=blake3(f"fake {self._rows}".encode()).hexdigest()[:32],
            placeholder=PLACEHOLDER,
            image_token_id=IMAGE_TOKEN_ID,
            hidden_size=HIDDEN_SIZE,
            dtype="float32",
        )

    @property
    def healthy(self) -> bool:
        return self._started and not self._closed

    async def start(self) -> None:
        self._started = True

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> list[EncodedMedia]:
        if not self.healthy:
            raise EngineNotReady("the encoder is closed" if self._closed else "the encoder has not started")
        for file in media:
            if file.kind == "image" and not file.data.startswith(_SIGNATURES):
                raise InvalidRequest("an image cannot be decoded", "image")
        work = asyncio.create_task(asyncio.sleep(self._seconds * len(media)))
        self._running.add(work)
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
            self._running.discard(work)
        if work.cancelled():
            raise EngineNotReady("the encoder is closing")
        self.encoded += len(media)
        return [self._encode(file) for file in media]

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        """Do nothing: no embeddings stay here."""

    async def close(self) -> None:
        self._closed = True
        for work in self._running:
            work.cancel()

    async def release_weights(self) -> None:
        assert not self._running, "it is told so while nothing is encoded"
        self._closed = True

    async def resume_weights(self) -> None:
        self._closed = False

    def _encode(self, file: MediaInput) -> EncodedMedia:
        seed = blake3(file.detail.encode()).update(file.data)
        rows = self._rows * max(1, file.sampling.num_frames)
        data = (seed.digest(1024) * (rows * HIDDEN_SIZE * 4 // 1024 + 1))[: rows * HIDDEN_SIZE * 4]
        return EncodedMedia(text=PLACEHOLDER * rows, rows=rows, data=data, dtype="float32")
