"""Runs the model's own processor on one image or video: pixels for the vision tower, and the text that replaces a
placeholder.

Each file is processed by itself, so that its embeddings do not depend on the rest of the prompt and can be cached.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from engine.media import MediaInput


class PixelRoom:
    """A limit, for threads, to the pixels that are processed at once: as many as the largest image may have.

    The copies of 64 million pixels take a gigabyte. Threads get room in the order in which they ask.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.free = most
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Wait until there is room for `count` pixels; if they never fit, until all room is free."""
        count = min(count, self.most)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self.free >= count)
            self.free -= count
        try:
            yield
        finally:
            with self._changed:
                self.free += count
                self._changed.notify()


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
        self._room = PixelRoom(config.max_image_pixels)  # of large images, for which no small one waits
        self.placeholder: str = self.processor.image_token
        """Text that the chat template writes for an image, and of an image token."""
        self.videos = VideoProcessing(config, facts, self._image_processor, self.processor)
        self.description = json.dumps(
            [facts.model_type, self._image_processor.to_dict(), settings, self.videos.description],
            sort_keys=True,
            default=str,
        )
        """All settings that change the result, as JSON."""

    def prepare(self, media: MediaInput, going_on: Callable[[], bool] = lambda: True) -> Prepared:
        """Decode and process a file; a video ends early once `going_on` returns False. Raises InvalidRequest."""
        if media.kind == "video":
            return self.videos.prepare(media, self._room.take, going_on)
        return self._image(media)

    def _image(self, image: MediaInput) -> Prepared:
        count = pixels(image)
        with self._room.take(count) if count > LARGE_PIXELS else nullcontext():
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
