"""Vision-language checkpoints: their language part runs here; their vision tower runs elsewhere, and what it makes comes with requests."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.configuration_utils import PreTrainedConfig

from engine.embedded.models.embeddings import PromptImages
from engine.kit.checks import ImageTokens
from engine.types import GenerateRequest

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


def rope_positions(module: Any, request: GenerateRequest, images: PromptImages) -> tuple[torch.Tensor, int]:
    """A prompt's positions in time, height and width, int64 [3, tokens], and what is added to those of the tokens that follow."""
    prompt, grids = torch.tensor([request.prompt_token_ids]), torch.tensor([image.grid for image in request.spans])
    is_image = torch.zeros(prompt.shape, dtype=torch.int)
    for places in images.places:
        is_image[0, torch.from_numpy(places)] = 1
    positions, delta = module.model.get_rope_index(prompt, is_image, image_grid_thw=grids)
    return positions[:, 0], int(delta)
