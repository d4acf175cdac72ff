"""The table of model families: everything in which one kind of checkpoint differs from the others.

To support a new family, add an entry to `FAMILIES` under its `model_type` in config.json. Models that are not in the
table run too if transformers or TensorRT-LLM runs them, but without images and not on the compiled path.
`tests/engine/checkpoints/test_families.py` compares every entry with transformers' classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Config = Mapping[str, Any]
"""The contents of a config.json."""


@dataclass(frozen=True)
class MediaPart:
    """Names of the parts of a model that takes media."""

    text_type: str
    """Default `model_type` of the language part, for a `text_config` that has none."""
    language: str
    """Submodule that holds the language part."""
    tower: tuple[str, ...]
    """Submodules that compute embeddings of media: the tower and the projector."""

    def text_tensor(self, name: str) -> str | None:
        """Return the name that a text-only model has for a checkpoint's tensor; None for a tensor of the tower."""
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
class AudioPart(MediaPart):
    """The facts that are needed to serve a family with audio: the encoder is Whisper's, and averages of two positions
    go through a projector of two layers (`engine/embedded/whisper/tower.py`)."""

    audio_token_id: int
    """Default id of the audio token, for a config.json that has none."""
    audio_token: str
    """Default text of the audio token, for a processor_config.json that has none."""


@dataclass(frozen=True)
class VisionPart(MediaPart):
    """The facts that are needed to serve a vision-language family with images."""

    image_token_id: int
    """Default id of the image token, for a config.json that has none."""
    processor: str
    """Name of the transformers class that expands the placeholder of an image in a prompt."""
    processor_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of the image processor, for outputs that `processor` needs."""
    processor_settings: Callable[[Config], dict[str, Any]] = lambda _: {}
    """Return settings of `processor` that processor_config.json may leave out, given a complete config.json."""
    tower_types: tuple[str, ...] = ()
    """Values of `model_type` in `vision_config` that can be served, the default first; empty for all."""
    merge: int = 0
    """Default `spatial_merge_size` of families with mRoPE, whose positions depend on image grids; 0 without mRoPE."""
    videos: Literal["patches", "frames"] | None = None
    """The input that the family's own processor makes of a video: Qwen2-VL's patches in space and time, or SmolVLM's
    frames with their times. None shows a video to the model as several images."""
    video_token_id: int = -1
    """Default id of the video token of families that have one."""
    tokens_per_second: int = 0
    """Default positions of a second of video in mRoPE; 0 counts patches, whatever their time."""


@dataclass(frozen=True)
class Family:
    """Special treatment of a `model_type`; the defaults stand for none."""

    compiled: Literal["", "CPU", "CPU and GPU"] = ""
    """Devices on which compiled code can run the model or, of a vision-language model, its language part."""
    defaults: Config = field(default_factory=dict)
    """transformers' defaults for keys that a config.json of this kind, or a nested `text_config`, may leave out."""
    slides: bool = False
    """Whether `sliding_window`, unless it is null, is the attention window of all layers."""
    vision: VisionPart | None = None
    """The part that takes images; None for models that cannot be served with images."""
    audio: AudioPart | None = None
    """The part that takes audio; None for models that cannot be served with audio."""
    no_images: str = ""
    """Reason why images cannot be served although the model takes them."""
    transcribes: bool = False
    """Whether the model writes down speech, and does nothing else (`engine/embedded/whisper/`)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Keys that config.json spells in another way, by the name that `ModelFacts` reads."""

    @property
    def media(self) -> MediaPart | None:
        return self.vision or self.audio


def _llava_settings(config: Config) -> dict[str, Any]:
    vision = config["vision_config"]
    return {
        "patch_size": vision["patch_size"],
        "vision_feature_select_strategy": config["vision_feature_select_strategy"],
        "num_additional_image_tokens": int(vision["model_type"] == "clip_vision_model"),
    }


_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip
_MISTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "eos_token_id": 2, "sliding_window": 4096,
}  # fmt: skip
_GEMMA3 = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "eos_token_id": 1, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_QWEN2_VL = {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "hidden_act": "silu", "eos_token_id": 151645,
}  # fmt: skip
_IDEFICS3 = VisionPart(
    text_type="llama",
    language="text_model",
    tower=("vision_model", "connector"),
    image_token_id=128257,
    processor="Idefics3Processor",  # SmolVLM's class expands images in the same way but imports num2words
    processor_arguments={"return_row_col_info": True},
)
_BOTH_DIRECTIONS = "which paged attention with its causal chunks cannot do"

FAMILIES = {
    "llama": Family(compiled="CPU and GPU", defaults=_LLAMA),
    "mistral": Family(compiled="CPU and GPU", defaults=_MISTRAL, slides=True),
    "qwen2": Family(compiled="CPU and GPU"),
    "qwen3": Family(compiled="CPU and GPU", defaults={"head_dim": 128}),
    "qwen2_vl_text": Family(defaults=_QWEN2_VL),
    "qwen2_5_vl_text": Family(defaults=_QWEN2_VL),
    "llava": Family(
        compiled="CPU and GPU",
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
            videos="patches",
            video_token_id=151656,
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
            videos="patches",
            video_token_id=151656,
            tokens_per_second=4,
        )
    ),
    "audioflamingo3": Family(
        compiled="CPU and GPU",
        audio=AudioPart(
            text_type="qwen2",
            language="language_model",
            tower=("audio_tower", "multi_modal_projector"),
            audio_token_id=151669,
            audio_token="<sound>",
        ),
    ),
    "idefics3": Family(compiled="CPU and GPU", vision=_IDEFICS3),
    "smolvlm": Family(compiled="CPU and GPU", vision=replace(_IDEFICS3, videos="frames")),
    "gemma3_text": Family(compiled="CPU", defaults=_GEMMA3),
    "gemma3": Family(no_images=f"its image tokens attend to each other in both directions, {_BOTH_DIRECTIONS}"),
    "paligemma": Family(no_images=f"its prompts attend in both directions, {_BOTH_DIRECTIONS}"),
    "whisper": Family(
        transcribes=True,
        names={
            "hidden_size": "d_model",
            "max_position_embeddings": "max_target_positions",
            "num_attention_heads": "decoder_attention_heads",
            "intermediate_size": "decoder_ffn_dim",
        },
    ),
    "mllama": Family(no_images="it attends to images by layers of their own, which the engine does not have"),
}
_OTHER = Family()


def family_of(model_type: str) -> Family:
    return FAMILIES.get(model_type, _OTHER)
