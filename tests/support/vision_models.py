"""Tiny vision-language models with random weights, one builder for each family, and images for them.

Every builder fills a folder like a checkpoint (configuration, weights, tokenizer, processor, chat template) and returns
it. Sizes are chosen so that an image is a few to some dozens of tokens; ids are those of `TOKENS` in every family.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

VOCAB_SIZE = 384
CONTEXT = 2048
HIDDEN = 64
EOS = 2
_SPECIAL = [
    "<pad>", "<s>", "</s>", "<image>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
    "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
]  # fmt: skip
TOKENS = {token: index for index, token in enumerate(_SPECIAL)}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_llava(path: Path, tower: str = "clip") -> Path:
    """Build LLaVA with a CLIP tower, whose class token is dropped, or with SigLIP's (`tower="siglip"`).

    An image is 16 tokens.
    """
    vision = {**_TOWER, "model_type": f"{tower}_vision_model", "image_size": 28, "patch_size": 7}
    select: dict[str, Any] = {"vision_feature_select_strategy": "default", "vision_feature_layer": -2}
    processor: Any = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    if tower == "siglip":
        vision["vision_use_head"] = False
        select = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
        processor = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    text = {**_TEXT, "model_type": "llama"}
    config = AutoConfig.for_model(
        "llava",
        text_config=text,
        vision_config=vision,
        image_token_index=TOKENS["<image>"],
        image_seq_length=16,
        **select,
    )
    _save(path, config, processor, "LlavaProcessor", "<image>")
    extra = {"patch_size": 7, "num_additional_image_tokens": int(tower == "clip"), "image_token": "<image>"}
    strategy = {"vision_feature_select_strategy": select["vision_feature_select_strategy"]}
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", **extra, **strategy}))
    return path


def build_qwen2_vl(path: Path) -> Path:
    """Build Qwen2-VL, with rotary positions in three dimensions.

    An image has as many tokens as it has squares of 8 pixels, within limits.
    """
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": HIDDEN,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
    }
    return _build_qwen(path, "qwen2_vl", vision)


def build_qwen2_5_vl(path: Path) -> Path:
    """Qwen2.5-VL: as Qwen2-VL, but its tower attends within windows of 16 pixels in all layers but the last."""
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2,
        "window_size": 16, "out_hidden_size": HIDDEN, "fullatt_block_indexes": [2],
    }  # fmt: skip
    return _build_qwen(path, "qwen2_5_vl", vision)


def build_idefics3(path: Path) -> Path:
    """Build Idefics3.

    An image is scaled to 64 pixels and cut into squares of 32, each 16 tokens, with one of the whole behind them.
    """
    return _build_idefics(path, "idefics3", "Idefics3Processor", Idefics3ImageProcessorPil)


def build_smolvlm(path: Path) -> Path:
    """SmolVLM: as Idefics3, by classes of its own."""
    return _build_idefics(path, "smolvlm", "SmolVLMProcessor", SmolVLMImageProcessorPil)


BUILDERS = {
    "llava": build_llava,
    "qwen2_vl": build_qwen2_vl,
    "qwen2_5_vl": build_qwen2_5_vl,
    "idefics3": build_idefics3,
    "smolvlm": build_smolvlm,
}


def image(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Coloured squares of 5 pixels, so that neither scaling nor cropping makes two seeds alike."""
    squares = np.random.default_rng(seed).integers(0, 256, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(5, 0).repeat(5, 1)[:height, :width])


def image_bytes(width: int = 40, height: int = 30, seed: int = 0, form: str = "PNG") -> bytes:
    """The same as a file."""
    buffer = io.BytesIO()
    image(width, height, seed).save(buffer, form)
    return buffer.getvalue()


def _build_qwen(path: Path, kind: str, vision: dict[str, Any]) -> Path:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    tokens = {
        "image_token_id": TOKENS["<|image_pad|>"], "video_token_id": TOKENS["<|video_pad|>"],
        "vision_start_token_id": TOKENS["<|vision_start|>"], "vision_end_token_id": TOKENS["<|vision_end|>"],
    }  # fmt: skip
    text = {**_TEXT, "rope_parameters": rope, "use_sliding_window": False}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **tokens)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    )
    name = "Qwen2VLProcessor" if kind == "qwen2_vl" else "Qwen2_5_VLProcessor"
    return _save(path, config, processor, name, "<|vision_start|><|image_pad|><|vision_end|>")


def _build_idefics(path: Path, kind: str, processor_class: str, image_processor_class: Any) -> Path:
    vision = {**_TOWER, "image_size": 32, "patch_size": 4}
    text = {**_TEXT, "model_type": "llama"}
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, scale_factor=2, image_token_id=TOKENS["<image>"], pad_token_id=0
    )
    processor = image_processor_class(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    _save(path, config, processor, processor_class, "<image>")
    (path / "processor_config.json").write_text(json.dumps({"processor_class": processor_class, "image_seq_len": 16}))
    return path


def _save(path: Path, config: Any, image_processor: Any, processor_class: str, placeholder: str) -> Path:
    """All that a folder has in common."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # of a size that makes attention, and images, matter
            parameter.data.normal_(0.0, 0.3)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=EOS, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer = _tokenizer()
    video = placeholder.replace("image", "video") if "Llava" not in processor_class else placeholder
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", placeholder).replace("VIDEO", video)
    tokenizer.save_pretrained(path)
    image_processor.save_pretrained(path)
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": processor_class}))
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of bytes, special tokens and a few merges.

    Two line feeds are one token, as in the models that the families come from.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the")]
    pieces = [*_SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
