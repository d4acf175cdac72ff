"""Families of models: all that sets one kind of checkpoint apart from the others, in one table.

A new family is one entry of `FAMILIES`, by its `model_type` in config.json. A model of a kind that is not in the table runs too, if
transformers or TensorRT-LLM runs it: without images, and not on the compiled path. `tests/engine/checkpoints/test_families.py` compares
the entries with transformers' classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
"""The contents of a config.json."""


@dataclass(frozen=True)
class VisionPart:
    """How a vision-language family takes images."""

    text_type: str
    """`model_type` of the language part if `text_config` has none."""
    language: str
    """Submodule of the model that is the language part."""
    tower: tuple[str, ...]
    """Submodules that compute embeddings of images: vision tower and projector."""
    image_token_id: int
    """The image token's id if config.json has none."""
    processor: str
    """transformers' class that expands an image's placeholder in a prompt."""
    processor_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What else the image processor is called with, so that its result says all that `processor` needs."""
    processor_settings: Callable[[Config], dict[str, Any]] = lambda _: {}
    """Settings of `processor` that processor_config.json may leave out, from a complete config.json."""
    tower_types: tuple[str, ...] = ()
    """The `model_type`s of `vision_config` that can be served, the default first; empty for all."""
    merge: int = 0
    """For families with mRoPE, whose positions depend on the grids of images: default of `spatial_merge_size`. 0 without mRoPE."""

    def text_tensor(self, name: str) -> str | None:
        """What a text model calls the tensor `name` of a checkpoint; None for a tensor of the tower."""
        if name.removeprefix("model.").split(".")[0] in self.tower:
            return None
        for prefix, plain in (
            (f"model.{self.language}.", "model."),
            (f"{self.language}.model.", "model."),  # the names in older files
            (f"{self.language}.lm_head.", "lm_head."),
        ):
            if name.startswith(prefix):
                return plain + name.removeprefix(prefix)
        return name


@dataclass(frozen=True)
class Family:
    """What is special about a `model_type`; by default nothing is."""

    compiled: bool = False
    """Whether the compiled path runs it; of a vision-language model, its language part."""
    defaults: Config = field(default_factory=dict)
    """transformers' defaults for the keys that a `text_config` of this kind may leave out."""
    window: int | None = None
    """The sliding window of all layers if config.json has no `sliding_window`; None for kinds that ignore that key."""
    vision: VisionPart | None = None
    """None for models that cannot be served with images."""
    no_images: str = ""
    """Why images cannot be served although the model takes some."""


def _llava_settings(config: Config) -> dict[str, Any]:
    vision = config["vision_config"]
    return {
        "patch_size": vision["patch_size"],
        "vision_feature_select_strategy": config["vision_feature_select_strategy"],
        "num_additional_image_tokens": int(vision["model_type"] == "clip_vision_model"),
    }


_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
    "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "eos_token_id": 2,
}  # fmt: skip
_QWEN2_VL = {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "hidden_act": "silu",
    "eos_token_id": 151645,
}  # fmt: skip
_IDEFICS3 = VisionPart(
    text_type="llama",
    language="text_model",
    tower=("vision_model", "connector"),
    image_token_id=128257,
    processor="Idefics3Processor",  # SmolVLM's own expands images alike, but needs num2words, for videos
    processor_arguments={"return_row_col_info": True},
)
_BOTH_DIRECTIONS = "which paged attention with its causal chunks cannot do"

FAMILIES = {
    "llama": Family(compiled=True, defaults=_LLAMA),
    "mistral": Family(compiled=True, window=4096),
    "qwen2": Family(compiled=True),
    "qwen2_vl_text": Family(defaults=_QWEN2_VL),
    "qwen2_5_vl_text": Family(defaults=_QWEN2_VL),
    "llava": Family(
        compiled=True,
        vision=VisionPart(
            text_type="llama",
            language="language_model",
            tower=("vision_tower", "multi_modal_projector"),
            image_token_id=32000,
            processor="LlavaProcessor",
            processor_settings=_llava_settings,
            tower_types=("clip_vision_model", "siglip_vision_model"),
        ),
    ),
    "qwen2_vl": Family(
        vision=VisionPart(
            text_type="qwen2_vl_text",
            language="language_model",
            tower=("visual",),
            image_token_id=151655,
            processor="Qwen2VLProcessor",
            merge=2,
        )
    ),
    "qwen2_5_vl": Family(
        vision=VisionPart(
            text_type="qwen2_5_vl_text",
            language="language_model",
            tower=("visual",),
            image_token_id=151655,
            processor="Qwen2_5_VLProcessor",
            merge=2,
        )
    ),
    "idefics3": Family(compiled=True, vision=_IDEFICS3),
    "smolvlm": Family(compiled=True, vision=_IDEFICS3),
    "gemma3": Family(no_images=f"its image tokens attend to each other in both directions, {_BOTH_DIRECTIONS}"),
    "paligemma": Family(no_images=f"its prompts attend in both directions, {_BOTH_DIRECTIONS}"),
    "mllama": Family(no_images="it attends to images by layers of their own, which the engine does not have"),
}
_UNKNOWN = Family()


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, _UNKNOWN)
