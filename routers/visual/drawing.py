"""Conversion of the fields of a body into the engine's request."""

import re
import secrets
from dataclasses import dataclass
from typing import Literal, TypeVar

from engine.visual.types import VisualInfo, VisualRequest
from multimodal.errors import RequestError
from protocol.visual import DrawingFields, ImageEditRequest, ImageFields, VideoRequest

T = TypeVar("T")

_SIZE = re.compile(r"([1-9]\d{0,5})\s*x\s*([1-9]\d{0,5})", re.ASCII | re.IGNORECASE)
_QUALITIES = {"low": 0.5, "high": 1.5, "hd": 1.5}
"""Factors of the model's own number of steps."""
_MAX_SIDE = 16_383
"""Pixels per side: the limit of WebP."""
_SEED_BITS = 32
"""Bits of seeds that are drawn here: any client can represent the number."""
_DEFAULT_QUALITY = 90


@dataclass(frozen=True)
class VisualLimits:
    """Limits for a request, by the settings of the same names."""

    visual_max_images: int
    visual_max_pixels: int
    visual_max_steps: int
    visual_max_frames: int
    visual_max_video_pixels: int
    max_image_bytes: int
    max_image_pixels: int


def image_request(
    body: ImageFields, info: VisualInfo, limits: VisualLimits, request_id: str, edited: tuple[int, int] | None = None
) -> VisualRequest:
    """Return the request for pictures, without files; `edited` is the size of the one to change.

    Raises RequestError.
    """
    _check_made(info, "image")
    count = body.n or 1
    if count > limits.visual_max_images:
        raise RequestError(f"'n' may be {limits.visual_max_images} at most (VISUAL_MAX_IMAGES).", "n")
    width, height = _size(body, info, limits, edited)
    compression = body.output_compression
    return VisualRequest(
        request_id=request_id,
        prompt=body.prompt,
        seeds=_seeds(body, count),
        width=width,
        height=height,
        steps=_steps(body, info.steps * _QUALITIES.get(body.quality or "", 1), limits),
        negative_prompt=_accepted(body.negative_prompt, "negative_prompt", "negative_prompt", info),
        guidance=_accepted(body.guidance_scale, "guidance", "guidance_scale", info, info.guidance),
        format=body.output_format or "png",
        quality=_DEFAULT_QUALITY if compression is None else compression,
        strength=body.strength if isinstance(body, ImageEditRequest) else None,
    )


def video_request(body: VideoRequest, info: VisualInfo, limits: VisualLimits, request_id: str) -> VisualRequest:
    """Return the request for a video. Raises RequestError."""
    _check_made(info, "video")
    width, height = _size(body, info, limits, None)
    frames, fps = _frames(body, info, limits)
    if (pixels := frames * width * height) > limits.visual_max_video_pixels:
        most = limits.visual_max_video_pixels
        raise RequestError(
            f"{frames} frames of {width}x{height} have {pixels} pixels; a video may have {most}"
            " (VISUAL_MAX_VIDEO_PIXELS).",
            "size" if body.num_frames is None and body.seconds is None else _length_field(body),
        )
    compression = body.output_compression
    return VisualRequest(
        request_id=request_id,
        prompt=body.prompt,
        seeds=_seeds(body, 1),
        width=width,
        height=height,
        steps=_steps(body, info.steps, limits),
        negative_prompt=_accepted(body.negative_prompt, "negative_prompt", "negative_prompt", info),
        guidance=_accepted(body.guidance_scale, "guidance", "guidance_scale", info, info.guidance),
        frames=frames,
        fps=fps,
        format="webm",
        quality=_DEFAULT_QUALITY if compression is None else compression,
    )


def _check_made(info: VisualInfo, kind: Literal["image", "video"]) -> None:
    if kind not in info.makes:
        made = {"image": "pictures: POST /v1/images/generations", "video": "videos: POST /v1/videos"}[info.makes[0]]
        raise RequestError(f"The model ({info.pipeline}) makes {made}.", "model", "wrong_modality")


def _size(
    body: DrawingFields, info: VisualInfo, limits: VisualLimits, edited: tuple[int, int] | None
) -> tuple[int, int]:
    step = info.multiple
    if body.size in (None, "auto"):
        if edited is None:
            return info.width, info.height
        width, height = (max(step, side // step * step) for side in edited)
    else:
        found = _SIZE.fullmatch(body.size or "")
        if found is None:
            raise RequestError("'size' must be WIDTHxHEIGHT, such as 512x512, or auto.", "size")
        width, height = int(found[1]), int(found[2])
    if max(width, height) > _MAX_SIDE:
        raise RequestError(f"'size' must have sides of at most {_MAX_SIDE} pixels.", "size")
    if width % step or height % step:
        near = "x".join(str(max(step, round(side / step) * step)) for side in (width, height))
        raise RequestError(f"'size' must have sides that are multiples of {step}, such as {near}.", "size")
    if width * height > limits.visual_max_pixels:
        raise RequestError(
            f"'size' is {width}x{height}; a picture may have {limits.visual_max_pixels} pixels (VISUAL_MAX_PIXELS).",
            "size",
        )
    return width, height


def _steps(body: DrawingFields, default: float, limits: VisualLimits) -> int:
    """Return the number of steps: the default as far as the limit allows it."""
    most = limits.visual_max_steps
    if (steps := body.num_inference_steps) is None:
        return min(max(1, round(default)), most)
    if steps > most:
        raise RequestError(f"'num_inference_steps' may be {most} at most (VISUAL_MAX_STEPS).", "num_inference_steps")
    return steps


def _seeds(body: DrawingFields, count: int) -> tuple[int, ...]:
    first = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed
    if first < 0:
        raise RequestError("'seed' must be 0 or more.", "seed")
    return tuple((first + number) % (1 << 63) for number in range(count))


def _accepted(value: T | None, what: str, field: str, info: VisualInfo, default: T | None = None) -> T | None:
    if value is not None and what not in info.accepts:
        raise RequestError(f"The pipeline {info.pipeline} takes no '{field}'.", field, "unsupported_parameter")
    return default if value is None and what in info.accepts else value


def _frames(body: VideoRequest, info: VisualInfo, limits: VisualLimits) -> tuple[int, float]:
    """Return the number of frames and how many come in a second."""
    seconds = _seconds(body.seconds)
    if body.num_frames is not None and seconds is not None and body.fps is not None:
        raise RequestError("Two of 'seconds', 'fps' and 'num_frames' say all.", "num_frames")
    if info.frames_fixed:
        if body.num_frames not in (None, info.frames):
            raise RequestError(f"'num_frames' must be {info.frames}: the model makes no others.", "num_frames")
        if seconds is not None and body.fps is not None and round(seconds * body.fps) != info.frames:
            raise RequestError(f"'seconds' times 'fps' must be {info.frames}: the model makes no others.", "seconds")
        frames = info.frames
    else:
        fps = body.fps or info.fps
        frames = body.num_frames or (info.frames if seconds is None else max(1, round(seconds * fps)))
        if body.num_frames is not None and (frames - 1) % info.frames_step:
            step = info.frames_step
            raise RequestError(f"'num_frames' must be one more than a multiple of {step}.", "num_frames")
        if body.num_frames is None and seconds is not None:
            frames = max(0, round((frames - 1) / info.frames_step)) * info.frames_step + 1
    if frames > limits.visual_max_frames:
        field = _length_field(body)
        raise RequestError(
            f"'{field}' asks for {frames} frames; at most {limits.visual_max_frames} are made (VISUAL_MAX_FRAMES).",
            field,
        )
    fixed = info.frames_fixed or body.num_frames is not None
    fps = body.fps or (frames / seconds if seconds is not None and fixed else info.fps)
    return frames, min(max(fps, 0.1), 120.0)


def _length_field(body: VideoRequest) -> str:
    return "seconds" if body.num_frames is None else "num_frames"


def _seconds(given: float | str | None) -> float | None:
    try:
        seconds = None if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < 1e6:
        raise RequestError("'seconds' must be a number above 0.", "seconds")
    return seconds
