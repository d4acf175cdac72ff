"""Vision-language checkpoints: their language part runs here; their vision tower runs elsewhere, and what it makes comes with requests."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.configuration_utils import PreTrainedConfig

from engine.kit.checks import ImageTokens

TOWERS = {
    "llava": ("vision_tower", "multi_modal_projector"),
    "qwen2_vl": ("visual",),
    "qwen2_5_vl": ("visual",),
    "idefics3": ("vision_model", "connector"),
    "smolvlm": ("vision_model", "connector"),
}
"""Kinds of models that take images, and what is of no use here: all that makes embeddings of them."""
_MROPE = ("qwen2_vl", "qwen2_5_vl")


def auto_class(config: PreTrainedConfig) -> Any:
    """That of transformers' automatic classes which loads this model."""
    return AutoModelForImageTextToText if config.model_type in TOWERS else AutoModelForCausalLM


def image_tokens(config: Any) -> ImageTokens | None:
    """How the model takes images; None if it takes none."""
    if config.model_type not in TOWERS:
        return None
    merge = config.vision_config.spatial_merge_size if config.model_type in _MROPE else 0
    return ImageTokens(config.image_token_id, config.get_text_config().hidden_size, merge)


def drop_tower(module: Any) -> Any:
    """The loaded model without what makes embeddings of images."""
    for name in TOWERS.get(module.config.model_type, ()):
        setattr(module.model, name, None)
    return module
