"""The types of visual generation's seam: configuration, requests, deltas and statistics."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from engine.config import MAX_IMAGE_PIXELS
from engine.transfer.shared_bytes import Data, readable

Made = Literal["image", "video"]
ImageFormat = Literal["png", "webp", "jpeg"]
MEDIA_TYPES: dict[str, str] = {
    "png": "image/png",
    "webp": "image/webp",
    "jpeg": "image/jpeg",
    "webm": "video/webm",
}
"""Media types by file format."""


class VisualConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of visual generation. A field means the same as the setting of its name, with or without
    `visual_`."""

    backend: Literal["diffusers", "trtllm", "fake"]
    model: str
    """Folder with model_index.json."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    max_batch: int = 4
    max_queue: int = 64
    steps: int = 0
    guidance: float = -1.0
    step_cache: float = 0.0
    cfg_batching: bool = True
    max_image_pixels: int = MAX_IMAGE_PIXELS
    arguments: dict[str, Any] = {}
    """Fields of TensorRT-LLM's `VisualGenArgs`."""
    hang_seconds: float = 0.0
    step_seconds: float = 0.0
    """Time that a step of the fake backend takes."""


FPS = 8.0
"""Frames a second of a video, if neither the request nor the pipeline says it."""


class VisualInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a backend, fixed at start."""

    pipeline: str
    """Name of the class that generates."""
    backend: str
    device: str
    dtype: str
    makes: tuple[Made, ...]
    accepts: tuple[str, ...] = ()
    """Optional fields that the pipeline takes: `negative_prompt` and `guidance`."""
    edits: bool = False
    """Whether it changes pictures."""
    animates: bool = False
    """Whether a video may begin with a picture."""
    needs_image: bool = False
    """Whether it makes no video without one."""
    inpaints: bool = False
    """Whether it changes the part of a picture that a mask names."""
    width: int = 512
    height: int = 512
    multiple: int = 8
    """Sides are multiples of this number of pixels."""
    steps: int = 50
    guidance: float | None = None
    frames: int = 1
    """Frames of a video, if the request names none."""
    frames_fixed: bool = False
    """Whether videos have no other number of frames."""
    frames_step: int = 1
    """Numbers of frames are one more than a multiple of this."""
    fps: float = FPS


class VisualRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pictures of one prompt, one for each seed, or one video."""

    request_id: str
    prompt: str
    seeds: tuple[int, ...]
    width: int
    height: int
    steps: int
    negative_prompt: str | None = None
    guidance: float | None = None
    """Strength of guidance; None for the pipeline's default."""
    frames: int = 0
    """0 for pictures."""
    fps: float = 0.0
    image: bytes = b""
    """File of the picture to change, or with which a video begins; empty for none."""
    mask: bytes = b""
    """File of a picture whose transparent, or white, part is to be changed; empty for all."""
    strength: float | None = None
    """Share of the picture that is changed, from 0 to 1."""
    previews: int = 0
    """How often the pictures are sent unfinished."""
    format: Literal["png", "webp", "jpeg", "webm"] = "png"
    quality: int = 90
    """Quality of JPEG, WEBP and WebM files, from 0 to 100."""

    def detach(self) -> "tuple[VisualRequest, list[Data]]":
        """Return the request without its files, and these."""
        return replace(self, image=b"", mask=b""), [self.image, self.mask]

    def attach(self, parts: Sequence[Data]) -> "VisualRequest":
        """Put back what `detach` took out. Raises ValueError."""
        image, mask = parts
        return replace(self, image=bytes(readable(image)), mask=bytes(readable(mask)))


class VisualDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of a request: how far it is, or a file, finished or a preview."""

    stage: Literal["generating", "preview", "postprocessing", "file"]
    progress: int = 0
    """Percent of all its work."""
    index: int = 0
    """Index of the file among those of the request."""
    data: bytes = b""
    last: bool = False
    """Whether the request is complete."""
    prompt_tokens: int = 0
    seconds: float = 0.0
    """Time that the file's batch took."""


class VisualStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures since the start, and of now."""

    waiting: int = 0
    """Pictures and videos that wait."""
    running: int = 0
    encoding: int = 0
    batches: int = 0
    steps: int = 0
    """Denoising steps of batches."""
    images: int = 0
    videos: int = 0
    frames: int = 0
    aborted: int = 0
    """Pictures and videos whose requests were cancelled."""
    failed: int = 0
    busy_seconds: float = 0.0
    """Time in which batches were computed."""
