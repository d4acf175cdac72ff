"""The model's configuration, and the file that holds what is trained.

The model is a `SmolVLMForConditionalGeneration`: smolvision's tower, a connector that joins four patches into one
token, and the language model as smolvision has it. The file has the connector, the tower's last norm, and a pair
`lora_down`, `lora_up` for each linear layer of both; `engine/checkpoints/merge.py` documents the format.
"""

import json
from pathlib import Path
from typing import Any

import torch

from smolvision.architecture import VISION, VOCABULARY, write
from smolvision.images import SIZE

TEXT_RANK = 12
TOWER_RANK = 8
FRAMES = 8
FPS = 2
"""Frames per second that the server takes of a clip, but no more than FRAMES."""
TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<video>")
"""Tokens after SmolLM2's vocabulary."""
IMAGE_TOKEN_ID = 49152
FRAME_TOKENS = 16
FRAME = "<fake_token_around_image><global-img>" + "<image>" * FRAME_TOKENS + "<fake_token_around_image>"
"""Text that SmolVLM's processor writes for an image or a frame."""
RENAMED = {"language_model.model.": "model.text_model.", "vision_tower.": "model.vision_model."}
"""smolvision's tensors that the model keeps, and the prefixes of their names in it."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'video' %}<video>{% elif part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""smolvision's chat template, with videos."""
CONFIG: dict[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "dtype": "bfloat16",
    "image_token_id": IMAGE_TOKEN_ID,
    "scale_factor": 2,
    "tie_word_embeddings": True,
    "vision_config": {name: value for name, value in VISION.items() if name != "vision_use_head"}
    | {"model_type": "smolvlm_vision"},
    "text_config": {"vocab_size": VOCABULARY},
}
_PIXELS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"longest_edge": SIZE},
    "max_image_size": {"longest_edge": SIZE},
    "resample": 1,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pad": True,
}


def files() -> dict[str, Any]:
    """Return the other files of the model folder by name: JSON objects and text."""
    return {
        "config.json": CONFIG,
        "preprocessor_config.json": _PIXELS
        | {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False},
        "video_preprocessor_config.json": _PIXELS
        | {
            "video_processor_type": "SmolVLMVideoProcessor",
            "do_sample_frames": True,
            "fps": FPS,
            "num_frames": FRAMES,
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": FRAME_TOKENS},
        "chat_template.jinja": TEMPLATE,
    }


def save(path: Path, tensors: dict[str, torch.Tensor], facts: dict[str, str]) -> None:
    """Write trained tensors as bfloat16, with `facts` as metadata. The file at `path` is replaced atomically."""
    metadata = {
        "format": "pt",
        "tokens": json.dumps(TOKENS),
        "renamed": json.dumps(RENAMED),
        "files": json.dumps(files()),
        **facts,
    }
    write(path, tensors, metadata)
