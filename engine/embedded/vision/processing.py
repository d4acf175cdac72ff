"""Runs the model's own processor on one image or video: pixels for the vision tower, and the text that replaces a
placeholder.

Each file is processed by itself, so that its embeddings do not depend on the rest of the prompt and can be cached.
"""

import json
from typing import Any

import torch
import transformers
from transformers import AutoImageProcessor, AutoTokenizer

from engine.checkpoints.facts import ModelFacts
from engine.config import EncoderConfig
from engine.embedded.vision.messages import LARGE_PIXELS
from engine.embedded.vision.videos import Prepared, VideoProcessing
from engine.errors import EngineFailure, InvalidRequest
from engine.kit.image_file import decode, limit_pixels, pixels
from engine.kit.time_slices import Room, SlicedWork, TimeSlices
from engine.media import MediaInput


class ImageProcessing:
    """The processor in a model's folder. `prepare` may run in several threads at once. Raises EngineFailure."""

    def __init__(self, config: EncoderConfig, facts: ModelFacts) -> None:
        self._max_pixels = config.max_image_pixels
        limit_pixels(config.max_image_pixels)
        try:
            self._image_processor = _load_image_processor(config)
            self.processor, settings = _load_processor(config.model, facts, self._image_processor)
        except EngineFailure:
            raise
        except Exception as error:  # tokenizers raises a bare Exception for a damaged tokenizer.json
            raise EngineFailure(f"the image processor of {config.model} cannot be loaded: {error}") from error
        self._arguments = facts.vision.processor_arguments
        most = config.max_image_pixels  # of which copies take 16 bytes each
        self._room = Room(most, small=most // 4, reserve=most // 4)
        self.placeholder: str = self.processor.image_token
        """Text that the chat template writes for an image, and of an image token."""
        self.videos = VideoProcessing(config, facts, self._image_processor, self.processor)
        self.description = json.dumps(
            [facts.model_type, self._image_processor.to_dict(), settings, self.videos.description],
            sort_keys=True,
            default=str,
        )
        """All settings that change the result, as JSON."""

    def prepare(self, media: MediaInput, work: SlicedWork | None = None) -> Prepared:
        """Decode and process a file, as a `work` that has begun; the caller ends it. Raises InvalidRequest."""
        if work is None:
            with TimeSlices(1).begin() as work:
                return self.prepare(media, work)
        if media.kind == "video":
            return self.videos.prepare(media, self._room, work)
        return self._image(media, work)

    def _image(self, image: MediaInput, work: SlicedWork) -> Prepared:
        count = pixels(image)
        if count > LARGE_PIXELS:
            work.hold(self._room, count)
        picture = decode(image, self._max_pixels)
        try:
            inputs = self._image_processor([picture], return_tensors="pt", **self._arguments)
        except ValueError as error:
            raise InvalidRequest(
                f"the model takes no image of {picture.width} x {picture.height} pixels", "image"
            ) from error
        text: str = self.processor.replace_image_token(inputs, image_idx=0)
        time, height, width = inputs["image_grid_thw"][0].tolist() if "image_grid_thw" in inputs else (0, 0, 0)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        return Prepared(tensors, text, text.count(self.placeholder), (time, height, width))


def _load_image_processor(config: EncoderConfig) -> Any:
    """Load Pillow's processor even where torchvision is installed: they scale differently, and replicas must agree."""
    load: Any = AutoImageProcessor.from_pretrained
    processor = load(config.model, backend="pil", local_files_only=True, **config.processor_options)
    if unknown := config.processor_options.keys() - processor.valid_kwargs.__annotations__.keys():
        raise EngineFailure(f"the model's image processor has no option {', '.join(sorted(unknown))}")
    return processor


def _load_processor(folder: str, facts: ModelFacts, image_processor: Any) -> tuple[Any, dict[str, Any]]:
    """Return the processor and the settings that it was made with."""
    base: Any = getattr(transformers, facts.vision.processor)

    class WithoutVideos(base):  # type: ignore[misc]
        """The processor without videos, whose processors need torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    settings: dict[str, Any] = base.get_processor_dict(folder, local_files_only=True)[0]
    settings = facts.vision.processor_settings(facts.config) | settings
    parts = {"image_processor": image_processor, "tokenizer": tokenizer, "video_processor": None}
    processor = WithoutVideos.from_args_and_dict([parts[name] for name in WithoutVideos.get_attributes()], settings)
    return processor, {name: value for name, value in settings.items() if name != "chat_template"}
