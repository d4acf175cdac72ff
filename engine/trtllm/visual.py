"""TensorRT-LLM's `VisualGen` as a pipeline. It is a prototype of 1.3, which 1.2.1 lacks.

`tests/contract/trtllm_visual.json` says what it takes and gives.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from engine.errors import EngineFailure, InvalidRequest
from engine.trtllm.versions import lacks_visual
from engine.visual.base import Picture, Tick
from engine.visual.types import VisualConfig, VisualInfo

_POLL_SECONDS = 0.2
"""Time between two looks whether anybody still waits: a computation cannot be cancelled, only left alone."""
_MULTIPLE = 16
"""Multiple that sides must be of; the pipelines check more, each its own."""

log = logging.getLogger(__name__)


class TrtllmVisualPipeline:
    """A `VisualPipeline`. Each picture is a request of its own, since all of a request share one seed."""

    def __init__(self, config: VisualConfig) -> None:
        self._config = config
        self._generator: Any = None
        self.broken = False

    def load(self) -> VisualInfo:
        if reason := lacks_visual():
            raise EngineFailure(reason)
        try:
            from tensorrt_llm.visual_gen import VisualGen, VisualGenArgs  # noqa: PLC0415 - exists on GPU machines only

            self._generator = VisualGen(self._config.model, args=VisualGenArgs(**self._config.arguments))
        except ImportError as error:
            raise EngineFailure(f"TensorRT-LLM's visual_gen cannot be imported: {error}") from error
        except Exception as error:  # of any kind, with its text: it names what is wrong with model and arguments
            raise EngineFailure(f"TensorRT-LLM cannot load {self._config.model}: {error}") from error
        return self._facts()

    def generate(self, batch: Sequence[Picture], tick: Tick) -> list[Any]:
        found = [self._begin(picture) for picture in batch]
        return [self._pixels(one, batch[0].request.steps, tick) for one in found]

    def prompt_tokens(self, prompt: str) -> int:
        return 0

    def close(self) -> None:
        if self._generator is not None:
            try:
                self._generator.shutdown()
            except Exception as error:
                log.warning("TensorRT-LLM did not shut down cleanly: %s", error)
            self._generator = None

    def _facts(self) -> VisualInfo:
        """Return what the pipeline declares: a field that it has no default for is one that it does not take."""
        default = self._generator.default_params
        video = default.num_frames is not None
        takes_image = "image_reference" in self._generator.ref_slot_specs
        return VisualInfo(
            pipeline="VisualGen",
            backend="trtllm",
            device="cuda",
            dtype="auto",
            makes=("video",) if video else ("image",),
            accepts=("negative_prompt", *(("guidance",) if default.guidance_scale is not None else ())),
            edits=not video and takes_image,
            animates=video and takes_image,
            width=default.width or 1024,
            height=default.height or 1024,
            multiple=_MULTIPLE,
            steps=self._config.steps or default.num_inference_steps or 50,
            guidance=self._config.guidance if self._config.guidance >= 0 else default.guidance_scale,
            frames=default.num_frames or 1,
            frames_step=4 if video else 1,
            fps=default.frame_rate or 16.0,
        )

    def _begin(self, picture: Picture) -> "Future[Any]":
        """Submit a picture. Raises InvalidRequest for what the pipeline declares that it does not take."""
        from tensorrt_llm.visual_gen import VisualGenParams  # noqa: PLC0415

        asked = picture.request
        fields: dict[str, Any] = {
            "height": asked.height,
            "width": asked.width,
            "num_inference_steps": asked.steps,
            "guidance_scale": asked.guidance,
            "seed": picture.seed,
            "negative_prompt": asked.negative_prompt,
        }
        if asked.frames:
            fields["num_frames"] = asked.frames
            if self._generator.default_params.frame_rate is not None:
                fields["frame_rate"] = asked.fps
        if asked.image:
            fields["image_reference"] = asked.image
        try:
            result = self._generator.generate_async(inputs=asked.prompt, params=VisualGenParams(**fields))
        except ValueError as error:
            raise InvalidRequest(f"TensorRT-LLM refuses this: {error}") from error
        return _in_thread(lambda: result.result(timeout=None))

    def _pixels(self, found: "Future[Any]", steps: int, tick: Tick) -> Any:
        while True:
            try:
                output = found.result(_POLL_SECONDS)
                break
            except ValueError as error:  # unusable content of a reference, say
                raise InvalidRequest(f"TensorRT-LLM refuses this: {error}") from error
            except MemoryError as error:
                raise EngineFailure("the GPU has too little memory for this: ask for a smaller size") from error
            except TimeoutError as error:
                if found.done():
                    raise EngineFailure("TensorRT-LLM failed: it gave up waiting") from error
                tick(0, steps)
            except RuntimeError as error:
                raise EngineFailure(f"TensorRT-LLM failed: {error}") from error
        if output.error is not None:
            raise EngineFailure(f"TensorRT-LLM failed: {output.error}")
        tick(steps, steps)
        if output.video is not None:
            return output.video[0].cpu().numpy()
        return output.image.cpu().numpy()  # a batch of one is a video of one frame


def _in_thread(work: Callable[[], Any]) -> "Future[Any]":
    """Begin work in a daemon thread, which does not delay the end of the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
