"""Settings of pictures and videos out."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from engine.visual.types import VisualConfig
from server.settings.types import JsonObject, Section

_CONFIG = VisualConfig(backend="fake", model="")


class VisualSettings(Section):
    """Settings of models of `diffusers`, and of the pictures and videos that they make."""

    group = "Pictures and videos out"

    modality: Literal["auto", "text", "visual"] = "auto"
    """Kind of the model's output: text, or pictures and videos (visual); auto takes visual for a folder of diffusers,
    which has a model_index.json. For a model of the hub that has not been downloaded, say visual.
    """
    visual_max_batch: int = Field(_CONFIG.max_batch, ge=1, le=256)
    """Maximum number of pictures, of equal size, steps and guidance, that are computed together."""
    visual_max_queue: int = Field(_CONFIG.max_queue, ge=0)
    """Number of pictures and videos that may wait for the model; more are refused with 429."""
    visual_steps: int = Field(_CONFIG.steps, ge=0)
    """Denoising steps of a request that names none; 0 takes the pipeline's default."""
    visual_guidance: float = Field(_CONFIG.guidance, ge=-1)
    """Guidance scale of a request that names none; -1 takes the pipeline's default."""
    visual_step_cache: float = Field(_CONFIG.step_cache, ge=0, lt=1)
    """Skip all but the first block of a transformer in steps in which that block's output has changed by less than this
    share, such as 0.05 (first-block cache, a form of TeaCache); 0 computes all. Pictures then depend a little on those
    computed with them.
    """
    visual_cfg_batching: bool = _CONFIG.cfg_batching
    """Compute the pictures with and without the prompt, which guidance needs, in one batch; false computes them one
    after the other, in half the memory.
    """
    visual_max_images: int = Field(10, ge=1, le=1000)
    """Maximum number of pictures of a request."""
    visual_max_pixels: int = Field(1 << 22, ge=64)
    """Maximum size of a picture, or a frame, in pixels: width times height."""
    visual_max_steps: int = Field(200, ge=1)
    """Maximum number of denoising steps of a request; defaults are cut to it."""
    visual_max_frames: int = Field(256, ge=1)
    """Maximum number of frames of a video."""
    visual_max_video_pixels: int = Field(1 << 28, ge=64)
    """Maximum size of a video in pixels, of all its frames. Making one takes about 16 bytes of memory for each."""
    video_max_jobs: int = Field(64, ge=1)
    """Number of videos, of all keys, that may wait or be made; more are refused with 429, but a key may always have
    one. If there are several keys, each may have a quarter. Keys take turns."""
    video_timeout_seconds: float = Field(3600.0, gt=0)
    """Seconds that a video may take, its wait for others included."""
    media_store_mb: int = Field(1024, ge=1)
    """Disk space in CACHE_DIR for pictures with URLs and for videos, in MiB; the oldest make room for new ones."""
    media_store_hours: float = Field(24.0, gt=0)
    """Hours for which these are kept."""

    visual_engine_args: JsonObject = ""
    """JSON object with arguments of TensorRT-LLM's VisualGenArgs, which only ENGINE=trtllm takes."""

    @field_validator("visual_cfg_batching", mode="after")
    @classmethod
    def _one_way_to_save(cls, value: bool, info: ValidationInfo) -> bool:
        if not value and info.data.get("visual_step_cache"):
            raise ValueError("false cannot be used with VISUAL_STEP_CACHE, which compares whole batches: choose one")
        return value
