"""The model's configuration, and the file that holds all trained weights.

The file has the tensors of the tower and the projector, and a pair `lora_down`, `lora_up` for each linear layer of the
language model. Its metadata holds the other files of the model folder; `engine/checkpoints/merge.py` documents the
format.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from smolvision.conversations import IMAGE_TOKEN, IMAGE_TOKEN_ID, IMAGE_TOKENS, TEMPLATE
from smolvision.images import PATCH, SIZE

RANK = 8
VOCABULARY = 49280
"""SmolLM2's 49152 tokens and the image token, padded to a multiple of 128."""
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "image_size": SIZE,
    "patch_size": PATCH,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vision_use_head": False,
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "dtype": "bfloat16",
    "image_token_index": IMAGE_TOKEN_ID,
    "image_seq_length": IMAGE_TOKENS,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "tie_word_embeddings": True,
    "vision_config": VISION,
    "text_config": {"vocab_size": VOCABULARY},
}
_IMAGES = {
    "image_processor_type": "SiglipImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"height": SIZE, "width": SIZE},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": IMAGE_TOKEN,
    "patch_size": PATCH,
    "vision_feature_select_strategy": "full",
    "num_additional_image_tokens": 0,
}


def language_config(base: Path) -> dict[str, Any]:
    """Return SmolLM2's configuration with room for the image token."""
    config: dict[str, Any] = json.loads((base / "config.json").read_text())
    return config | CONFIG["text_config"]


def files() -> dict[str, Any]:
    """Return the other files of the model folder by name: JSON objects and text."""
    return {
        "config.json": CONFIG,
        "preprocessor_config.json": {**_IMAGES, "processor_class": "LlavaProcessor"},
        "processor_config.json": _PROCESSOR,
        "chat_template.jinja": TEMPLATE,
    }


def save(path: Path, tensors: dict[str, torch.Tensor], facts: dict[str, str]) -> None:
    """Write trained tensors as bfloat16, with `facts` as metadata. The file at `path` is replaced atomically."""
    write(path, tensors, {"format": "pt", "image_token": IMAGE_TOKEN, "files": json.dumps(files()), **facts})


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write tensors as bfloat16. The file at `path` is replaced atomically."""
    part = path.with_suffix(".part")
    save_file(
        {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        part,
        metadata,
    )
    part.replace(path)


def trained_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return tower and projector of a LlavaForConditionalGeneration, by their prefixes in files."""
    parts = {"vision_tower": "model.vision_tower", "multi_modal_projector": "model.multi_modal_projector"}
    return {name: model.get_submodule(path) for name, path in parts.items()}
