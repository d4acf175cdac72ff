"""TensorRT-LLM's `MultimodalEncoder`, the vision part of a model alone, as the `Encoder` of an encode replica."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Self

from engine.config import TrtllmEncoderConfig
from engine.encoder import EncoderInfo
from engine.errors import EngineDied, EngineError, EngineFailure, EngineNotReady, InvalidRequest
from engine.media import Encoding, MediaInput, RemoteRows
from engine.trtllm import library
from engine.trtllm.disaggregation import encoding_of
from engine.trtllm.media import decoded
from engine.trtllm.watching import Watch

log = logging.getLogger(__name__)


class TrtllmEncoder:
    """Encodes all images of a prompt together. The `Encoding` has handles of embeddings on the GPU."""

    def __init__(self, config: TrtllmEncoderConfig) -> None:
        self._config = config
        self._encoder: Any = None
        self._dead = False
        self._watch: Watch | None = None
        self._waiting: set[asyncio.Future[Any]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def info(self) -> EncoderInfo:
        if self._encoder is None:
            raise EngineNotReady("the encoder is not running")
        return EncoderInfo()

    @property
    def healthy(self) -> bool:
        return self._encoder is not None and not self._dead and library.is_alive(self._encoder)

    async def start(self) -> None:
        """Blocks the event loop while the model loads. Raises EngineFailure, with nothing left running."""
        started = time.monotonic()
        self._watch = Watch(self._config.hang_seconds)
        try:
            self._encoder = library.load(self._config)
        except EngineFailure:
            self._watch.stop()
            raise
        self._watch.follow(self._encoder, lambda: bool(self._waiting), self._die)
        seconds = time.monotonic() - started
        log.info("TensorRT-LLM has loaded the encoder of %s in %.1f s", self._config.model, seconds)

    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> Encoding:
        if self._encoder is None:
            raise EngineNotReady("the encoder is not running")
        most = library.installed().max_encoded_images
        if most and len(media) > most:
            raise InvalidRequest(f"this encoder takes {most} image of a prompt, and the engine the others", "image")
        pixels = await decoded(media, self._config)
        if (encoder := self._encoder) is None or self._dead:
            raise EngineNotReady("the encoder is closing")
        result = library.encode(encoder, prompt, pixels)
        waiting = asyncio.ensure_future(result)
        self._waiting.add(waiting)
        try:
            await waiting
            return encoding_of(result, prompt)
        except asyncio.CancelledError:
            result.abort()
            caller = asyncio.current_task()
            if self._dead and caller is not None and not caller.cancelling():
                raise EngineDied("the encoder died while the request ran") from None
            raise
        except EngineError:
            raise
        except Exception as error:  # raised by TensorRT-LLM
            failure = library.translate(encoder, error)
            self._dead = self._dead or isinstance(failure, EngineDied)
            if not isinstance(failure, InvalidRequest):
                log.error("%s", failure, exc_info=error)
            raise failure from error
        finally:
            self._waiting.discard(waiting)
            if self._watch is not None:
                self._watch.progress()

    def _die(self, reason: str) -> None:
        self._dead = True
        log.critical("%s", reason)
        for waiting in self._waiting:
            waiting.cancel()

    def release(self, rows: RemoteRows, *, lost: bool = False) -> None:
        """Do nothing: no embeddings stay here."""

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        encoder, self._encoder = self._encoder, None
        if encoder is not None and not (self._watch is not None and self._watch.broken):
            await asyncio.to_thread(library.shutdown, encoder)
