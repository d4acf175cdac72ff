"""Create a folder with the shape of LLaVA 1.5 7B, for `--load-format dummy`.

The tower is CLIP ViT-L/14 at 336 pixels with 576 tokens per image, the language model Llama 2 7B. The values are those
of config.json and preprocessor_config.json in llava-hf/llava-1.5-7b-hf.
"""

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from benchmarks.gpu.model import Shape, write_folder

LLAMA_2_7B = Shape(4096, 32, 32, 32, 11008, vocabulary=32064, max_position=4096, spread=0.02)
IMAGE = "<image>"
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_PIXELS = {
    "image_processor_type": "CLIPImageProcessor",
    "do_convert_rgb": True,
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    "resample": 3,
}
_SELECT = {"vision_feature_select_strategy": "default"}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + IMAGE
    + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_llava(folder: Path, text: Shape = LLAMA_2_7B) -> None:
    """Write config.json, tokenizer, image processor and chat template. The image token is the vocabulary's last."""
    write_folder(folder, replace(text, vocabulary=text.vocabulary - 1))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    of_text = {**_read(folder / "config.json"), "vocab_size": text.vocabulary}
    files = {
        "config.json": {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": of_text,
            "vision_config": _CLIP,
            "image_token_index": text.vocabulary - 1,
            "image_seq_length": 576,
            "vision_feature_layer": -2,
            "projector_hidden_act": "gelu",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **_SELECT,
        },
        "preprocessor_config.json": {"processor_class": "LlavaProcessor", **_PIXELS},
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "image_token": IMAGE,
            **_SELECT,
        },
        "tokenizer_config.json": {**_read(folder / "tokenizer_config.json"), "chat_template": _TEMPLATE},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))


def _read(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text())
    return content
