"""Requests whose embeddings stayed where they were made, for the engine to read there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from engine.base import DeltaStream, Engine
from engine.errors import EmbeddingsLost, EngineError, EngineFailure
from engine.types import Delta, GenerateRequest
from multimodal.text.prompts import MediaPrompts, Prompt

log = logging.getLogger(__name__)


class RemoteMediaRun:
    """One such request. If the engine cannot read the embeddings, it is made again from the prompt that `again`
    returns, whose embeddings come with it. The encoder is told as soon as they are no longer needed.
    """

    def __init__(
        self, engine: Engine, request: GenerateRequest, images: MediaPrompts, again: Callable[[], Awaitable[Prompt]]
    ) -> None:
        self.stream = DeltaStream(self._abort)
        self._engine = engine
        self._request = request
        self._images = images
        self._again = again
        self._deltas = 0
        self._released = False
        self._retry: asyncio.Task[None] | None = None
        self._running = engine.generate(request)
        self._running.pipe(self._pass_on)

    def _pass_on(self, output: Delta | Exception) -> None:
        if isinstance(output, EmbeddingsLost) and not self._deltas:
            log.warning("encoding the media of request %s again: %s", self._request.request_id, output)
            self._release(lost=True)
            self._retry = asyncio.create_task(self._start_again())
            return
        self._deltas += 1
        # The first delta may be a prefill replica's: the engine here reads them for itself until the second.
        if self._deltas > 1 or not isinstance(output, Delta) or output.finish_reason is not None:
            self._release()
        self.stream.push(output)

    async def _start_again(self) -> None:
        try:
            prompt = await self._again()
            name = f"{self._request.request_id}-again"  # the engine may not have forgotten the lost request yet
            request = replace(self._request, request_id=name, prompt_token_ids=tuple(prompt.ids), media=prompt.media)
            self._running = self._engine.generate(request)
            self._running.pipe(self.stream.push)
        except EngineError as error:
            self.stream.fail(error)
        except Exception as error:  # a bug must not leave the consumer waiting
            log.exception("media could not be encoded again")
            self.stream.fail(EngineFailure(f"encoding media again failed: {type(error).__name__}"))

    def _release(self, *, lost: bool = False) -> None:
        if not self._released:
            self._released = True
            self._images.release(self._request.media, lost=lost)

    def _abort(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._running.close()
        self._release()
