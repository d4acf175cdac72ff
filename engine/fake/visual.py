"""A deterministic pipeline without a model: flat pictures whose colour is a digest of prompt and seed."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from engine.errors import EngineFailure, InvalidRequest
from engine.visual.base import Picture, Tick
from engine.visual.types import VisualConfig, VisualInfo


class FakePipeline:
    """Makes pictures and videos; a video's colour changes with the time. The prompt `fail` fails, and `refuse` is
    refused.
    """

    broken = False

    def __init__(self, config: VisualConfig) -> None:
        self._config = config

    def load(self) -> VisualInfo:
        return VisualInfo(
            pipeline="FakePipeline",
            backend="fake",
            device="cpu",
            dtype="uint8",
            makes=("image", "video"),
            accepts=("negative_prompt", "guidance"),
            edits=True,
            animates=True,
            inpaints=True,
            width=64,
            height=64,
            steps=self._config.steps or 4,
            guidance=self._config.guidance if self._config.guidance >= 0 else 5.0,
            frames=8,
        )

    def generate(self, batch: Sequence[Picture], tick: Tick) -> list[Any]:
        asked = batch[0].request
        for step in range(asked.steps):
            time.sleep(self._config.step_seconds)
            tick(step + 1, asked.steps)
        for picture in batch:
            if picture.request.prompt == "fail":
                raise EngineFailure("the fake pipeline was told to fail")
            if picture.request.prompt == "refuse":
                raise InvalidRequest("the fake pipeline was told to refuse", "prompt")
        return [self._pixels(picture) for picture in batch]

    def prompt_tokens(self, prompt: str) -> int:
        return len(prompt.split())

    def close(self) -> None:
        pass

    def _pixels(self, picture: Picture) -> Any:
        asked = picture.request
        digest = blake3(f"{asked.prompt}\0{asked.negative_prompt}\0{asked.guidance}\0{picture.seed}".encode())
        digest.update(asked.image)
        digest.update(asked.mask)
        colour = np.frombuffer(digest.digest()[:3], np.uint8)
        frames = np.empty((max(1, asked.frames), asked.height, asked.width, 3), np.uint8)
        for number, frame in enumerate(frames):
            frame[:] = colour + 8 * number
        return frames
