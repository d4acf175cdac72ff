"""VisualGen of main, by `tests/contract/trtllm_visual.json`. The version 1.2.1 has no such module.

A folder whose name contains `video` makes videos. Pictures have the colour of their seed; prompts name failures.
"""

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import ConfigDict, create_model

from tensorrt_llm._contract import _FOLDER, NEWEST

if not NEWEST:
    raise ModuleNotFoundError("No module named 'tensorrt_llm.visual_gen'", name="tensorrt_llm.visual_gen")

CONTRACT: dict[str, Any] = json.loads((_FOLDER / "trtllm_visual.json").read_text(encoding="utf-8"))
_TYPES = {"int": int, "float": float, "str": str, "bytes": bytes, "dict": dict}
_FORBID = ConfigDict(extra="forbid")
_DECLARED = (
    "height",
    "width",
    "num_inference_steps",
    "guidance_scale",
    "max_sequence_length",
    "num_frames",
    "frame_rate",
)
_FAILURES = {"client": ValueError, "capacity": MemoryError, "bug": RuntimeError}

VisualGenArgs: Any = create_model(
    "VisualGenArgs",
    __config__=_FORBID,
    **dict.fromkeys(CONTRACT["models"]["VisualGenArgs"]["fields"], (Any, None)),
)
VisualGenParams: Any = create_model(
    "VisualGenParams",
    __config__=_FORBID,
    **{name: (_TYPES[kind] | None, None) for name, kind in CONTRACT["models"]["VisualGenParams"]["fields"].items()},
)


class VisualGenResult:
    def __init__(self, work: Callable[[], Any], release: threading.Event) -> None:
        self._work = work
        self._release = release

    def result(self, timeout: float | None = None) -> Any:
        self._release.wait(timeout)
        return self._work()

    def cancel(self) -> None:
        raise NotImplementedError("Cancel request (not yet implemented).")


class VisualGen:
    """`release` holds all results back while it is not set."""

    release = threading.Event()
    release.set()
    submitted: list[tuple[str, Any]] = []

    def __init__(self, model: str, args: Any = None) -> None:
        if not isinstance(args, VisualGenArgs | None):
            raise TypeError("args must be VisualGenArgs")
        defaults = {"height": 64, "width": 32, "num_inference_steps": 8, "guidance_scale": 4.0}
        if "video" in str(model):
            defaults |= {"num_frames": 5, "frame_rate": 16.0}
        elif "plain" in str(model):
            del defaults["guidance_scale"]
        self._defaults = defaults
        takes_image = bool({"edit", "animate"} & {*str(model).split("-")})
        self.ref_slot_specs = {"image_reference": SimpleNamespace(roles=[])} if takes_image else {}
        self.extra_param_specs: dict[str, Any] = {}
        self.running = True

    @property
    def default_params(self) -> Any:
        return VisualGenParams(**self._defaults)

    def generate_async(self, inputs: str | list[str], params: Any = None) -> VisualGenResult:
        assert self.running
        assert isinstance(inputs, str)
        params = (params or self.default_params).model_copy()
        for name in _DECLARED:
            if getattr(params, name) is not None and name not in self._defaults:
                raise ValueError(
                    f"Parameter validation failed: '{name}' is set but the loaded pipeline does not accept it"
                )
        if params.image_reference is not None and not self.ref_slot_specs:
            raise ValueError("'image_reference' is not accepted by the loaded pipeline.")
        type(self).submitted.append((inputs, params))

        def work() -> Any:
            if inputs in _FAILURES:
                raise _FAILURES[inputs](f"Generation failed: {inputs}")
            pixels = torch.full((1, params.height, params.width, 3), params.seed % 256, dtype=torch.uint8)
            video = pixels[:, None].repeat(1, params.num_frames, 1, 1, 1) if params.num_frames else None
            return SimpleNamespace(error=None, image=pixels if video is None else None, video=video)

        return VisualGenResult(work, self.release)

    def shutdown(self) -> None:
        self.running = False
