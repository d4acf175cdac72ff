"""Decodes media for TensorRT-LLM, whose processors take pixels and samples: in threads, before a request begins."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL.Image import Image, fromarray

from engine.base import DeltaStream
from engine.config import TrtllmConfig
from engine.errors import EngineError, EngineFailure
from engine.kit.audio_file import RATE, decode_audio
from engine.kit.image_file import decode
from engine.kit.video_file import VideoFile, evenly, sampling_of
from engine.media import MediaInput
from engine.types import Delta

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frames:
    """Frames of a video, with the metadata that TensorRT-LLM's own loader returns."""

    frames: list[Image]
    metadata: dict[str, Any]


Sound = tuple[np.ndarray, int]
"""Samples of a recording and how many are a second, as TensorRT-LLM's own loader returns them."""
Decoded = Image | Frames | Sound


async def decoded(media: Sequence[MediaInput], config: TrtllmConfig) -> list[Decoded]:
    """Decode files one after the other, pictures in RGB and upright. Raises InvalidRequest, whose param is the kind."""
    left = threading.Event()
    try:
        return [await asyncio.to_thread(_decoded, file, config, lambda: not left.is_set()) for file in media]
    finally:
        left.set()


def _decoded(file: MediaInput, config: TrtllmConfig, going_on: Callable[[], bool]) -> Decoded:
    if file.kind == "image":
        return decode(file, config.max_image_pixels)
    if file.kind == "audio":
        return decode_audio(file.data, config.max_audio_seconds, going_on), RATE
    video = VideoFile(file, config.videos, going_on)
    taken = dict(video.frames(evenly(video.total, video.fps, sampling_of(file.sampling, config.videos))))
    return Frames(
        [fromarray(frame) for frame in taken.values()],
        {
            "total_num_frames": video.total,
            "fps": video.fps,
            "duration": video.seconds,
            "frames_indices": [*taken],
        },
    )


class Deferred:
    """A request that begins once its images are decoded. Its `stream` exists at once; closed early, it never begins."""

    def __init__(
        self, images: Sequence[MediaInput], config: TrtllmConfig, begin: Callable[[list[Decoded]], DeltaStream]
    ) -> None:
        self.stream = DeltaStream(self._abort)
        self._images = images
        self._config = config
        self._begin = begin
        self._begun: DeltaStream | None = None

    async def run(self) -> None:
        """Decode, then begin the request. The calling task is cancelled if the stream ends before."""
        task = asyncio.current_task()
        assert task is not None
        self.stream.when_done(task.cancel)
        try:
            self._begun = self._begin(await decoded(self._images, self._config))
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
