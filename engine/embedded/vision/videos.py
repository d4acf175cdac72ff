"""Runs a family's processing on one video: what its transformers processor would make of the same frames.

transformers' own video processors need torchvision, which the server does without. A frame is resized as soon as it is
decoded, so that only one is in memory at its full size.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from engine.checkpoints.facts import ModelFacts
from engine.config import EncoderConfig
from engine.errors import EngineFailure, InvalidRequest
from engine.kit.time_slices import Room, SlicedWork
from engine.kit.video_file import VideoFile, as_qwen, as_smolvlm, evenly, sampling_of
from engine.kit.video_text import video_text
from engine.media import FrameSampling, MediaInput

_CHOOSE = {None: evenly, "frames": as_smolvlm, "patches": as_qwen}
_FULL_FRAMES = 3
"""Frames at full size whose memory a decoder takes, with the frame that it has decoded."""
_MOST_PROCESSED = 1 << 20
"""Pixels that a frame has once it is processed as an image, in models of today."""
MOST_PIXELS = 1 << 28
"""Pixels that all frames of a video may have once they are scaled. They are in memory together, at 12 bytes each."""
_RESAMPLING = {2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class Prepared:
    """An image or video for the tower.

    `tensors` are arguments of `get_image_features`, with images in the first dimension.
    """

    tensors: dict[str, torch.Tensor]
    text: str
    rows: int
    grid: tuple[int, int, int]
    interval: float = 1.0
    stay: bool = False
    """The same as in `MediaInput`."""


class VideoProcessing:
    """The processing of videos for one model. Raises EngineFailure for a configuration that cannot be used."""

    def __init__(self, config: EncoderConfig, facts: ModelFacts, image_processor: Any, processor: Any) -> None:
        self._options = config.videos
        self._kind = facts.vision.videos
        self._image_processor = image_processor
        self._processor = processor
        self._arguments = facts.vision.processor_arguments
        self._settings = _settings(Path(config.model))
        self._tokens_per_second = facts.tokens_per_second
        self._own = _own_sampling(self._settings)
        self._token = processor.image_token
        self.placeholder = ""
        """Text that the chat template writes for a video; empty if it writes an image's."""
        if self._kind == "frames":
            self.placeholder = getattr(processor, "video_token", "<video>")
        elif self._kind == "patches":
            self.placeholder = self._token = processor.video_token
        self.description = [self._kind or "", self._settings, str(self._options)]

    def prepare(self, video: MediaInput, room: Room, work: SlicedWork) -> Prepared:
        """Decode and process a file, with room for its pixels. Raises InvalidRequest."""
        file = VideoFile(video, self._options, work)
        sampling = sampling_of(video.sampling, self._options, self._own)
        wanted = _CHOOSE[self._kind](file.total, file.fps, sampling)
        pixels = math.prod(file.size)
        try:
            scaled = math.prod(self._scaled(*file.size)) if self._kind == "patches" else min(pixels, _MOST_PROCESSED)
            work.hold(room, _FULL_FRAMES * pixels + len(wanted) * scaled, file.close)
            frames = file.frames(wanted)
            if self._kind == "patches":
                return self._patches(file, (self._resized(frame) for _, frame in frames), len(wanted))
            return self._images(file, [(index, self._image(frame)) for index, frame in frames])
        except ValueError as error:
            raise InvalidRequest("the model takes no video of this shape", "video") from error

    def _image(self, frame: np.ndarray) -> dict[str, Any]:
        """Process a frame as an image, which is not split."""
        own = ("size", "max_image_size") if self._kind == "frames" else ()
        options = {name: self._settings[name] for name in own if name in self._settings}
        if "do_image_splitting" in self._image_processor.valid_kwargs.__annotations__:
            options["do_image_splitting"] = False
        picture = Image.fromarray(frame)
        return dict(self._image_processor([picture], return_tensors="pt", **self._arguments, **options))

    def _images(self, file: VideoFile, frames: list[tuple[int, dict[str, Any]]]) -> Prepared:
        """Join frames that were processed as images."""
        inputs = [one for _, one in frames]
        texts = [self._processor.replace_image_token(one, image_idx=0) for one in inputs]
        text = "".join(texts)
        if self._kind == "frames":
            text = video_text(texts[0], [index / file.fps for index, _ in frames], file.seconds)
        nested = inputs[0]["pixel_values"].dim() == 5  # [prompts, images, channels, height, width]
        tensors = {
            name: torch.cat([one[name] for one in inputs], int(nested))
            for name, tensor in inputs[0].items()
            if isinstance(tensor, torch.Tensor)
        }
        return Prepared(tensors, text, text.count(self._token), (0, 0, 0))

    def _resized(self, frame: np.ndarray) -> torch.Tensor:
        """Return a frame as Qwen2-VL's processor resizes it, uint8 [channels, height, width]."""
        pixels = torch.from_numpy(frame).permute(2, 0, 1)
        height, width = self._scaled(*frame.shape[:2])
        mode = _RESAMPLING.get(self._number("resample", 3), "bicubic")
        if (height, width) == pixels.shape[1:]:
            return pixels
        return functional.interpolate(pixels[None], (height, width), mode=mode, align_corners=False, antialias=True)[0]

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that a frame has for the model. Raises ValueError."""
        size = self._settings.get("size", {})
        return resized(
            height,
            width,
            self._number("patch_size", 14) * self._number("merge_size", 2),
            self._settings.get("min_pixels") or size.get("shortest_edge", 128 * 28 * 28),
            self._settings.get("max_pixels") or size.get("longest_edge", 768 * 28 * 28),
        )

    def _patches(self, file: VideoFile, frames: Iterator[torch.Tensor], most: int) -> Prepared:
        """Cut frames, `most` of them at most, into patches of space and time."""
        patch, merge, depth = (
            self._number(name, default)
            for name, default in (("patch_size", 14), ("merge_size", 2), ("temporal_patch_size", 2))
        )
        mean, deviation = (
            torch.tensor(getattr(self._image_processor, name)).view(1, -1, 1, 1) * 255
            for name in ("image_mean", "image_std")
        )
        count = height = width = 0
        cuts: list[torch.Tensor] = []
        while group := [*islice(frames, depth)]:
            count += len(group)
            if (all_pixels := most * group[0][0].numel()) > MOST_PIXELS:
                raise InvalidRequest(
                    f"{most} frames of the video have {all_pixels} pixels once they are scaled; a video may have "
                    f"{MOST_PIXELS}: ask for a lower 'num_frames'",
                    "video",
                )
            pixels = torch.stack([*group, *group[-1:] * (depth - len(group))]).float()
            pixels = (pixels - mean) / deviation
            height, width = pixels.shape[2] // patch, pixels.shape[3] // patch
            cut = pixels.view(depth, 3, height // merge, merge, patch, width // merge, merge, patch)
            cuts.append(cut.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(height * width, 3 * depth * patch**2))
        time, values = len(cuts), torch.cat(cuts)
        rows = time * height * width // merge**2
        interval = 1.0
        if self._tokens_per_second:
            taken = count / file.total * file.fps  # frames a second
            interval = float(np.float32(self._tokens_per_second) * np.float32(depth / taken))
        tensors = {"pixel_values": values, "image_grid_thw": torch.tensor([[time, height, width]])}
        return Prepared(tensors, self._token * rows, rows, (time, height, width), interval)

    def _number(self, name: str, default: int) -> int:
        value = self._settings.get(name)
        return default if value is None else int(value)


def resized(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Return height and width as Qwen2-VL's processors round them: multiples of `factor`, `least` to `most` pixels.

    Raises ValueError for frames that are 200 times as long as wide.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError("too long for its width")
    rounded = round(height / factor) * factor, round(width / factor) * factor
    if rounded[0] * rounded[1] > most:
        scale = math.sqrt(height * width / most)
        return (
            max(factor, math.floor(height / scale / factor) * factor),
            max(factor, math.floor(width / scale / factor) * factor),
        )
    if rounded[0] * rounded[1] < least:
        scale = math.sqrt(least / (height * width))
        return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return rounded


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the model's video processor, wherever its folder has them. Raises EngineFailure."""
    try:
        for name, key in (
            ("processor_config.json", "video_processor"),
            ("video_preprocessor_config.json", ""),
            ("preprocessor_config.json", ""),
        ):
            if (path := folder / name).is_file():
                found = json.loads(path.read_text(encoding="utf-8"))
                found = found.get(key) if key else found
                if isinstance(found, Mapping):
                    sampling = found.get("video_sampling") or {}
                    more = {"num_frames": sampling.get("max_frames"), "fps": sampling.get("fps"),
                            "size": sampling.get("video_size")}  # fmt: skip
                    return {**found, **{name: value for name, value in more.items() if value}}
    except (OSError, ValueError, AttributeError) as error:
        raise EngineFailure(f"the settings of videos in {folder} cannot be read: {error}") from error
    return {}


def _own_sampling(settings: Mapping[str, Any]) -> FrameSampling:
    """Return which frames the model's folder asks for."""
    fps, count = settings.get("fps") or 0, settings.get("num_frames") or 0
    return FrameSampling(float(fps), int(count))
