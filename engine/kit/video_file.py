"""Decode frames of a video file in memory. A video that cannot be decoded raises InvalidRequest.

Frames are read one after another: many files seek wrongly, and evenly spread frames need no seek. FFmpeg skips corrupt
data. The header is checked first, and decoding has a time limit.
"""

import io
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from engine.config import VideoOptions
from engine.errors import InvalidRequest
from engine.media import ANY_FRAMES, FrameSampling, MediaInput

_PARAM = "video"
_DEFAULT_FPS = 24.0
"""Frames per second of a file whose header lacks them or is nonsense, as in transformers."""
_MOST_FPS = 1000.0
_SAMPLED_FPS = 2.0
"""Default number of frames taken per second: that of Qwen's own tools."""
_MOST_FAILURES = 64
"""Number of consecutive frames that cannot be decoded, after which the file counts as ended."""
_UNREADABLE = "the video cannot be read: it must be a whole MP4, WebM, Matroska or AVI file"

os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # about oddities in users' files
os.environ.setdefault("OPENCV_LOG_LEVEL", "OFF")


class VideoFile:
    """An opened file, whose header keeps within the limits. Raises InvalidRequest.

    Decoding ends early once `going_on` returns False; time that this call takes does not count as decoding.
    """

    def __init__(self, video: MediaInput, options: VideoOptions, going_on: Callable[[], bool] = lambda: True) -> None:
        import cv2  # noqa: PLC0415 - slow to import, and only videos need it

        self._cv2 = cv2
        self._data = video.data
        self._options = options
        self._going_on = going_on
        self._until = time.monotonic() + options.decode_seconds
        self._capture: Any = self._open()
        width, height, count, fps = (
            float(self._capture.get(name))
            for name in (
                cv2.CAP_PROP_FRAME_WIDTH,
                cv2.CAP_PROP_FRAME_HEIGHT,
                cv2.CAP_PROP_FRAME_COUNT,
                cv2.CAP_PROP_FPS,
            )
        )
        self._check_size(width, height)
        self.size = int(height), int(width)
        """Height and width of a frame in pixels, from the file's header."""
        self.fps = fps if 0 < fps <= _MOST_FPS else _DEFAULT_FPS
        self.total = int(count) if 0 < count < 1 << 40 else self._counted()
        """Number of frames by the header or, without one there, by counting."""
        if self.seconds > options.max_seconds:
            raise InvalidRequest(
                f"the video has {self.seconds:.0f} seconds, {self.total} frames; the most is {options.max_seconds:g} "
                "seconds",
                _PARAM,
            )
        self._left = self._until - time.monotonic()
        """Seconds that decoding may still take."""

    @property
    def seconds(self) -> float:
        return self.total / self.fps

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (index, frame) for `wanted` indices in rising order. Frames are upright uint8 RGB, [height, width, 3].

        A frame that cannot be decoded is replaced by the next one that can. Iteration stops at the end of the file.
        Raises InvalidRequest if no frame can be decoded.
        """
        self._until = time.monotonic() + self._left  # what passes between opening a file and reading it is no decoding
        if self._capture is None:
            self._capture = self._open()
        rising = iter(wanted)
        index = next(rising, None)
        failures = 0
        shape: tuple[int, ...] = ()
        for place in range(self.total):
            if index is None or failures > _MOST_FAILURES:
                break
            if not self._grab():
                failures += 1
                continue
            failures = 0
            if place >= index and (frame := self._frame()) is not None:
                if frame.shape != (shape or frame.shape):
                    raise InvalidRequest("the frames of the video differ in size", _PARAM)
                shape = frame.shape
                yield place, frame
                index = next(rising, None)
        if not shape:
            raise InvalidRequest("no frame of the video can be decoded", _PARAM)

    def close(self) -> None:
        """Give the decoder's memory back; `frames` opens the file again."""
        self._capture = None

    def _open(self) -> Any:
        file: Any = io.BytesIO(self._data)
        capture = self._cv2.VideoCapture(file, self._cv2.CAP_FFMPEG, [])
        if not capture.isOpened():
            raise InvalidRequest(_UNREADABLE, _PARAM)
        return capture

    def _check_size(self, width: float, height: float) -> None:
        most = self._options.max_pixels
        if not min(width, height) >= 1:
            raise InvalidRequest(_UNREADABLE, _PARAM)
        if not width * height <= most:
            raise InvalidRequest(
                f"the video's frames, {width:.0f} x {height:.0f}, have more than {most} pixels", _PARAM
            )

    def _counted(self) -> int:
        count = 0
        while count <= self._options.max_seconds * self.fps and self._grab():
            count += 1
        self._capture = self._open()
        return count

    def _grab(self) -> bool:
        asked = time.monotonic()
        if not self._going_on():
            raise InvalidRequest("nobody waits for the video any more", _PARAM)
        self._until += (now := time.monotonic()) - asked
        if now > self._until:
            raise InvalidRequest(
                f"the video takes longer than {self._options.decode_seconds:g} seconds to decode", _PARAM
            )
        return bool(self._capture.grab())

    def _frame(self) -> np.ndarray | None:
        done, frame = self._capture.retrieve()
        if not done or frame is None or frame.ndim != 3:
            return None
        self._check_size(frame.shape[1], frame.shape[0])
        return np.ascontiguousarray(frame[:, :, ::-1])


def sampling_of(asked: FrameSampling, options: VideoOptions, own: FrameSampling = ANY_FRAMES) -> FrameSampling:
    """Return the choice of frames: the requested one, else that of the server or of the model (`own`), within the
    server's limit."""
    found = next((one for one in (asked, options.sampling, own) if one != ANY_FRAMES), FrameSampling(_SAMPLED_FPS))
    return replace(found, num_frames=min(found.num_frames or options.max_frames, options.max_frames))


# Which frames are taken of a video with `total` frames, `fps` of them a second: their indices.


def evenly(total: int, fps: float, sampling: FrameSampling) -> list[int]:
    """Return the indices of frames that vLLM chooses: evenly from the first to the last."""
    count = min(sampling.num_frames, total)
    if sampling.fps:
        count = max(1, min(count, math.floor(total / fps * sampling.fps)))
    return _unique(np.linspace(0, total - 1, count))


def as_smolvlm(total: int, fps: float, sampling: FrameSampling) -> list[int]:
    """Return the indices of frames as SmolVLM's processor chooses them: from the first to the last, without the first
    and last second of a long video."""
    count = sampling.num_frames
    if sampling.fps:
        count = max(1, min(round(sampling.fps * (total / fps)), count))
    first, last = 0, total - 1
    if total / fps - 2 > sampling.num_frames * sampling.fps > 0:
        first, last = int(fps), min(int(total - fps), total - 1)
    return _unique(np.linspace(first, last, count))


def as_qwen(total: int, fps: float, sampling: FrameSampling, patch: int = 2, least: int = 4) -> list[int]:
    """Return the indices of frames as Qwen2-VL's processor chooses them: an even number, at least `least`.

    `patch` is the length of a patch in frames. Each frame stands at the beginning of its share of the video.
    """
    if sampling.fps:
        most = min(sampling.num_frames, total) // patch * patch
        count = int(min(max(total / fps * sampling.fps, least), most, total)) // patch * patch
    else:
        count = min(round(sampling.num_frames / patch) * patch, total)
    count = max(count, 1)
    return _unique(np.arange(count, dtype=np.float32) * np.float32(total / count))


def _unique(places: np.ndarray) -> list[int]:
    return sorted({int(place) for place in places})
