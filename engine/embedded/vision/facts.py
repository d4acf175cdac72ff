"""What a model folder says of the images that its model takes. JSON only, so that any process may ask."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import EngineFailure

_IMAGE_TOKEN_IDS = {"llava": 32000, "qwen2_vl": 151655, "qwen2_5_vl": 151655, "idefics3": 128257, "smolvlm": 128257}
"""Of the families served: the id that a config.json without one means."""
_LLAVA_TOWERS = ("clip_vision_model", "siglip_vision_model")
_WHY_NOT = {
    "gemma3": "its image tokens attend to each other in both directions, which paged attention with its causal chunks cannot do",
    "paligemma": "its prompts attend in both directions, which paged attention with its causal chunks cannot do",
    "mllama": "it attends to images by layers of their own, which the engine does not have",
}


class VisionFacts(NamedTuple):
    """Of a model that takes images here."""

    family: str
    """Its `model_type`."""
    image_token_id: int
    mrope: bool
    """Whether its positions depend on the images' grids."""


def has_vision(folder: Path) -> bool:
    """Whether the folder holds a vision-language model that can be served with images."""
    return not _objection(_config(folder))


def vision_facts(folder: Path) -> VisionFacts:
    """Raises EngineFailure, which says why, where `has_vision` is false."""
    config = _config(folder)
    if objection := _objection(config):
        raise EngineFailure(objection)
    family = config["model_type"]
    image_token_id = config.get("image_token_id", config.get("image_token_index", _IMAGE_TOKEN_IDS[family]))
    return VisionFacts(family, image_token_id, mrope=family.startswith("qwen2"))


def _objection(config: dict[str, Any]) -> str:
    """Why the model cannot be served with images; empty if it can."""
    family = config.get("model_type", "")
    if "vision_config" not in config:
        return "the model takes no images"
    if family not in _IMAGE_TOKEN_IDS:
        return f"images for models of type {family} are not supported: {_WHY_NOT.get(family, 'only for ' + ', '.join(_IMAGE_TOKEN_IDS))}"
    tower = config["vision_config"].get("model_type", _LLAVA_TOWERS[0])
    if family == "llava" and tower not in _LLAVA_TOWERS:
        return f"images for llava with a {tower} are not supported: only with {' or '.join(_LLAVA_TOWERS)}"
    return ""


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config
