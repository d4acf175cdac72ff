"""The pipeline of `diffusers` that a folder's model_index.json names. Its weights must be safetensors."""

import io
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, apply_first_block_cache
from PIL import Image, ImageOps

from engine.errors import EngineFailure, InvalidRequest
from engine.kit.image_file import decode, limit_pixels
from engine.media import MediaInput
from engine.visual.base import Picture, Show, Tick, is_previewed
from engine.visual.types import FPS, VisualConfig, VisualInfo, VisualRequest

_FRAMES = ("num_frames", "video_length")
"""Names of the parameter of pipelines that make videos."""
_OF_IMAGES = re.compile("ToVideo|ToWorld|I2V")
_SIDE = 512
_CLIP = 16
"""Default side and number of frames of a pipeline that has none."""
_FIXED: dict[str, Any] = {"use_resolution_binning": False, "clean_caption": False}
"""Parameters that some pipelines have: sizes are as asked, and prompts as written."""

log = logging.getLogger(__name__)


class DiffusersPipeline:
    """A `VisualPipeline`."""

    def __init__(self, config: VisualConfig) -> None:
        self._config = config
        self._pipe: Any = None
        self._edit: Any = None
        """Pipeline that changes pictures, or makes videos of them."""
        self._inpaint: Any = None
        self._parameters: dict[str, Any] = {}
        """Parameters of a call, with their defaults."""
        self._info: VisualInfo | None = None
        self.broken = False

    def load(self) -> VisualInfo:
        """Load the folder."""
        config = self._config
        limit_pixels(config.max_image_pixels)
        if config.threads:
            torch.set_num_threads(config.threads)
        device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
        auto = "bfloat16" if device.startswith("cuda") else "float32"
        dtype = auto if config.dtype == "auto" else config.dtype
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        # It warns of processors that no pipeline here uses.
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        try:
            self._pipe = diffusers.DiffusionPipeline.from_pretrained(
                config.model, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
            ).to(device)
        except Exception as error:  # of any kind: a folder may lack anything
            raise EngineFailure(f"diffusers cannot load {config.model}: {error}") from error
        self._pipe.set_progress_bar_config(disable=True)
        self._parameters = _parameters(self._pipe)
        if "prompt" not in self._parameters:
            raise EngineFailure(f"{type(self._pipe).__name__} of {config.model} takes no prompt")
        if not self._makes_videos:
            self._edit = _counterpart(diffusers.AutoPipelineForImage2Image, self._pipe)
            self._inpaint = _counterpart(diffusers.AutoPipelineForInpainting, self._pipe)
        elif "image" in self._parameters:
            self._edit = self._pipe
        elif isinstance(self._pipe, diffusers.LTXPipeline):  # the only one whose weights do both
            self._edit = _counterpart(diffusers.LTXImageToVideoPipeline, self._pipe)
        self._prepare_steps()
        self._info = self._facts(device, dtype)
        return self._info

    def generate(self, batch: Sequence[Picture], tick: Tick, show: Show = lambda _: None) -> list[Any]:
        asked = batch[0].request
        pipe = self._pipe
        arguments = self._arguments(batch)
        if asked.image:
            pipe = self._inpaint if asked.mask else self._edit
            arguments = self._with_image(asked, arguments, _parameters(pipe))

        def stepped(step: int, steps: int, latents: Any) -> None:
            tick(step, steps)
            if is_previewed(asked, step, steps):
                try:
                    if (pixels := _seen(pipe, latents, asked)) is not None:
                        show(pixels)
                except EngineFailure as error:  # float16 may be too small for what pipelines decode in float32
                    log.debug("a preview is left out: %s", error)

        arguments |= _reporting(_parameters(pipe), stepped, asked.steps)
        try:
            with torch.inference_mode(), self._fresh_cache():
                found = pipe(**arguments)
        except ValueError as error:
            raise InvalidRequest(f"the pipeline refuses this: {error}") from error
        except IndexError as error:
            if asked.steps > 1:
                raise
            # PixArt's pipelines take one step for one of a distilled model, and read a second result of its scheduler.
            raise InvalidRequest("this model needs more than one step", "num_inference_steps") from error
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise EngineFailure("the GPU has too little memory for this: ask for a smaller size") from error
        except RuntimeError as error:
            self.broken = "CUDA error" in str(error)
            raise
        frames = getattr(found, "frames", None)
        return _bytes_of([image[None] for image in found.images] if frames is None else frames)

    def prompt_tokens(self, prompt: str) -> int:
        tokenizer = getattr(self._pipe, "tokenizer", None)
        return 0 if tokenizer is None else len(tokenizer(prompt).input_ids)

    def close(self) -> None:
        self._pipe = self._edit = self._inpaint = None

    def _arguments(self, batch: Sequence[Picture]) -> dict[str, Any]:
        """Return the arguments that pictures without a file need. Each picture has a generator of its own, on the CPU:
        so a seed gives the same noise on every device, and in every batch.
        """
        asked = batch[0].request
        optional: dict[str, Any] = {
            "width": asked.width,
            "height": asked.height,
            **{name: asked.frames for name in _FRAMES if asked.frames},
            "frame_rate": asked.fps,
            **_FIXED,
        }
        if asked.guidance is not None:
            optional["guidance_scale"] = asked.guidance
        if asked.negative_prompt is not None:
            optional["negative_prompt"] = [picture.request.negative_prompt for picture in batch]
        return {
            "prompt": [picture.request.prompt for picture in batch],
            "num_inference_steps": asked.steps,
            "generator": [torch.Generator("cpu").manual_seed(picture.seed) for picture in batch],
            "output_type": "np",
            **{name: value for name, value in optional.items() if name in self._parameters},
        }

    def _with_image(
        self, asked: VisualRequest, arguments: dict[str, Any], parameters: dict[str, Any]
    ) -> dict[str, Any]:
        size = asked.width, asked.height
        try:
            image = decode(MediaInput(asked.image), self._config.max_image_pixels)
        except InvalidRequest as error:
            raise error.at("input_reference" if asked.frames else "image") from error
        image = ImageOps.fit(image, size) if asked.frames else image.resize(size)
        changed: dict[str, Any] = {**arguments, "image": image, "width": asked.width, "height": asked.height}
        if asked.mask:
            changed["mask_image"] = _mask(asked.mask, self._config.max_image_pixels).resize(size)
        if "strength" in parameters:
            changed["strength"] = strength = parameters["strength"] if asked.strength is None else asked.strength
            if int(asked.steps * strength) < 1:
                raise InvalidRequest(
                    f"'strength' {strength:g} leaves none of {asked.steps} steps: ask for more of either", "strength"
                )
        return {name: value for name, value in changed.items() if name in parameters}

    def _prepare_steps(self) -> None:
        """Apply the settings of steps. Raises EngineFailure for what this pipeline cannot do."""
        denoiser = self.denoiser
        if not self._config.cfg_batching:
            denoiser.forward = _in_halves(denoiser.forward)
        if not self._config.step_cache:
            return
        try:
            apply_first_block_cache(denoiser, FirstBlockCacheConfig(threshold=self._config.step_cache))
        except (IndexError, ValueError) as error:
            kind = type(denoiser).__name__
            raise EngineFailure(f"VISUAL_STEP_CACHE: {kind} has no row of transformer blocks") from error

    @contextmanager
    def _fresh_cache(self) -> Iterator[None]:
        """Forget what the steps of other pictures have cached; their last step may never have come."""
        if not self._config.step_cache:
            yield
            return
        from diffusers.hooks.hooks import CacheContext, _set_cache_context  # noqa: PLC0415

        registry = HookRegistry.check_if_exists_or_initialize(self.denoiser)
        registry.reset_stateful_hooks(recurse=True)
        if not isinstance(self.denoiser, diffusers.CacheMixin):  # else the pipeline names the contexts
            _set_cache_context(self.denoiser, CacheContext("all"))
        try:
            yield
        finally:
            registry.reset_stateful_hooks(recurse=True)

    @property
    def _makes_videos(self) -> bool:
        return any(name in self._parameters for name in _FRAMES)

    @property
    def denoiser(self) -> Any:
        """The network whose steps remove noise."""
        found = getattr(self._pipe, "transformer", None) or getattr(self._pipe, "unet", None)
        if found is None:
            raise EngineFailure(f"{type(self._pipe).__name__} has neither a transformer nor a unet")
        return found

    def _facts(self, device: str, dtype: str) -> VisualInfo:
        config, parameters = self._config, self._parameters
        scale = _first_of(
            self._pipe, 8, "vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio"
        )
        sizes = self.denoiser.config
        patch = sizes.get("patch_size", 1)
        sample = sizes.get("sample_size")
        side = sample * scale if isinstance(sample, int) else 0
        frames = next((name for name in _FRAMES if name in parameters), None)
        fixed = sizes.get("video_length", 0)
        accepts = {"negative_prompt": "negative_prompt", "guidance": "guidance_scale"}
        if (parameters.get("true_cfg_scale") or math.inf) <= 1:  # of Flux: without it the prompt would be ignored
            del accepts["negative_prompt"]
        return VisualInfo(
            pipeline=type(self._pipe).__name__,
            backend="diffusers",
            device=device,
            dtype=dtype,
            makes=("video",) if frames else ("image",),
            accepts=tuple(name for name, own in accepts.items() if own in parameters),
            edits=self._edit is not None and not frames,
            animates=self._edit is not None and frames is not None,
            needs_image=frames is not None and _needs_image(self._pipe),
            inpaints=self._inpaint is not None,
            width=side or parameters.get("width") or _SIDE,
            height=side or parameters.get("height") or _SIDE,
            multiple=max(8, scale * (patch if isinstance(patch, int) else patch[-1])),
            steps=config.steps or parameters.get("num_inference_steps") or 50,
            guidance=config.guidance if config.guidance >= 0 else parameters.get("guidance_scale"),
            frames=(fixed or parameters[frames] or _CLIP) if frames else 1,
            frames_fixed=bool(fixed),
            frames_step=_first_of(self._pipe, 1, "vae_scale_factor_temporal", "vae_temporal_compression_ratio"),
            fps=parameters.get("frame_rate") or FPS,
        )


def _first_of(pipe: Any, default: int, *names: str) -> int:
    """Return the first of the attributes that a pipeline has."""
    return next((int(found) for name in names if (found := getattr(pipe, name, None))), default)


def _needs_image(pipe: Any) -> bool:
    """Return whether a pipeline makes no video without a picture: by its call, or by its name, since some calls have
    a default that they then refuse.
    """
    default = _parameters(pipe).get("image")
    return default is Parameter.empty or bool(_OF_IMAGES.search(type(pipe).__name__))


def _parameters(pipe: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in signature(type(pipe).__call__).parameters.items()}


def _counterpart(family: Any, pipe: Any) -> Any:
    """Return the pipeline with the same weights that changes pictures; None if the family has none."""
    try:
        found = family.from_pipe(pipe)
    except Exception as error:  # ValueError for a family without one, anything for pipelines that nobody has tried
        log.debug("%s has no counterpart among %s", type(pipe).__name__, family.__name__, exc_info=error)
        return None
    found.set_progress_bar_config(disable=True)
    return found


def _seen(pipe: Any, latents: Any, request: VisualRequest) -> list[Any] | None:
    """Return what latents look like, with the noise that is left in them; None for autoencoders that nobody has tried.
    It costs as much as the decoding of the finished pictures.
    """
    vae = getattr(pipe, "vae", None)
    if latents is None or not isinstance(vae, diffusers.AutoencoderKL):
        return None
    if latents.ndim == 3:  # Flux' are packed
        latents = pipe._unpack_latents(latents, request.height, request.width, pipe.vae_scale_factor)
    scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0)
    pixels = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
    return _bytes_of([image[None] for image in pipe.image_processor.postprocess(pixels, output_type="np")])


def _reporting(parameters: dict[str, Any], stepped: Callable[[int, int, Any], None], steps: int) -> dict[str, Any]:
    """Return the arguments by which a pipeline calls `stepped`, in the way that it has."""

    def at_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        stepped(step + 1, max(getattr(pipe, "num_timesteps", steps), step + 1), tensors.get("latents"))
        return {}

    if "callback_on_step_end" in parameters:
        return {"callback_on_step_end": at_step_end}
    if "callback" in parameters:
        return {"callback": lambda step, _timestep, latents: stepped(step + 1, steps, latents), "callback_steps": 1}
    return {}


def _in_halves(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a denoiser's `forward` that computes a batch of pairs, with and without the prompt, one after the other,
    which takes half the memory. A batch of an odd number has no pairs.
    """

    def halves(value: Any, size: int) -> tuple[Any, Any]:
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == size:
            first, second = value.chunk(2)
            return first, second
        if isinstance(value, dict):
            parts = {name: halves(entry, size) for name, entry in value.items()}
            return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}
        return value, value

    def call(*arguments: Any, **named: Any) -> Any:
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor) and value.ndim]
        size = tensors[0].shape[0]
        if size % 2:
            return forward(*arguments, **named)
        split = [halves(value, size) for value in arguments]
        split_named = {name: halves(value, size) for name, value in named.items()}
        first, second = (
            forward(*(part[i] for part in split), **{name: part[i] for name, part in split_named.items()})
            for i in (0, 1)
        )
        if isinstance(first, tuple):
            return tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
        return type(first)(sample=torch.cat([first.sample, second.sample]))

    return call


def _mask(data: bytes, max_pixels: int) -> Image.Image:
    """Return a mask in diffusers' form, whose white part is changed, of OpenAI's, whose transparent part is."""
    try:
        decode(MediaInput(data), max_pixels)
    except InvalidRequest as error:
        raise error.at("mask") from error
    with Image.open(io.BytesIO(data)) as opened:
        if not opened.has_transparency_data:
            return opened.convert("L")
        return opened.convert("RGBA").getchannel("A").point(lambda alpha: 255 - alpha)


def _bytes_of(videos: Any) -> list[Any]:
    """Return numbers from 0 to 1 as bytes. Raises EngineFailure if some are no numbers."""
    made = []
    for frames in videos:
        array = np.stack([np.asarray(frame, dtype=np.float32) for frame in frames])
        if not np.isfinite(array).all():
            raise EngineFailure("the model has computed values that are not a picture: try another DTYPE")
        made.append((array.clip(0, 1) * 255).round().astype(np.uint8))
    return made
