"""Decodes images for TensorRT-LLM, whose processor takes pixels: in threads, before a request begins."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from PIL.Image import Image

from engine.base import DeltaStream
from engine.errors import EngineError, EngineFailure
from engine.kit.image_file import decode
from engine.media import MediaInput
from engine.types import Delta

log = logging.getLogger(__name__)


async def decoded(images: Sequence[MediaInput], max_pixels: int) -> list[Image]:
    """Decode images one after the other, in RGB and upright. Raises InvalidRequest (param `image`)."""
    return [await asyncio.to_thread(decode, image, max_pixels) for image in images]


class Deferred:
    """A request that begins once its images are decoded. Its `stream` exists at once; closed early, it never begins."""

    def __init__(
        self, images: Sequence[MediaInput], max_pixels: int, begin: Callable[[list[Image]], DeltaStream]
    ) -> None:
        self.stream = DeltaStream(self._abort)
        self._images = images
        self._max_pixels = max_pixels
        self._begin = begin
        self._begun: DeltaStream | None = None

    async def run(self) -> None:
        """Decode, then begin the request. The calling task is cancelled if the stream ends before."""
        task = asyncio.current_task()
        assert task is not None
        self.stream.when_done(task.cancel)
        try:
            self._begun = self._begin(await decoded(self._images, self._max_pixels))
        except EngineError as error:
            self.stream.fail(error)
        except MemoryError as error:
            log.error("there is no memory for a request's images", exc_info=error)
            self.stream.fail(EngineFailure("there is no memory for the request's images"))
        else:
            self._begun.pipe(self._pass_on)

    def _pass_on(self, output: Delta | Exception) -> None:
        if isinstance(output, Delta):
            self.stream.put(output)
        else:
            self.stream.fail(output)

    def _abort(self) -> None:
        if self._begun is not None:
            self._begun.close()
