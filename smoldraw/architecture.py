"""The models: components of diffusers and transformers in small sizes, and files that hold a whole folder.

A file has the tensors of all components as bfloat16, named by their file in the folder and their name there. Its
metadata holds the folder's other files. `engine/checkpoints/merge.py` unpacks it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
)
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from smoldraw.prompts import vocabulary
from smoldraw.render import FRAMES, PIXELS

LATENT = PIXELS // 4
"""Height and width of latents."""
CHANNELS = 4
TEXT = 128
"""Width of the text encoder."""
GUIDANCE = 3.0
"""Scale of classifier-free guidance that evaluation uses."""

_LAYERS = 8
"""Layers of a transformer; that of clips has as many temporal layers in addition."""
_HEADS, _HEAD = 6, 32


def make_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=4,
        sample_size=PIXELS,
        mid_block_add_attention=False,
    )


def make_tokenizer() -> T5Tokenizer:
    """Return a tokenizer of the words of prompts; other words become letters."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"▁{word}", -4.0) for word in vocabulary()]
    letters = [(letter, -9.0) for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789.,"]
    return T5Tokenizer(vocab=special + words + letters, extra_ids=0, model_max_length=120)


def make_text_encoder(tokens: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=tokens,
            d_model=TEXT,
            d_kv=32,
            d_ff=192,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )


def make_transformer(kind: str) -> PixArtTransformer2DModel | LatteTransformer3DModel:
    """Return the transformer of pictures ("image") or of clips ("clip")."""
    same: dict[str, Any] = {
        "num_attention_heads": _HEADS,
        "attention_head_dim": _HEAD,
        "num_layers": _LAYERS,
        "in_channels": CHANNELS,
        "cross_attention_dim": _HEADS * _HEAD,
        "caption_channels": TEXT,
        "sample_size": LATENT,
        "patch_size": 2,
    }
    if kind == "image":
        return PixArtTransformer2DModel(**same, out_channels=CHANNELS)
    return LatteTransformer3DModel(
        **same,
        out_channels=2 * CHANNELS,  # LattePipeline drops the second half
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        video_length=FRAMES,
    )


def make_scheduler() -> DPMSolverMultistepScheduler:
    return DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)


def make_pipeline(kind: str, **components: Any) -> DiffusionPipeline:
    """Return diffusers' pipeline of trained components."""
    pipeline = PixArtAlphaPipeline if kind == "image" else LattePipeline
    made: DiffusionPipeline = pipeline(tokenizer=make_tokenizer(), scheduler=make_scheduler(), **components)
    made.set_progress_bar_config(disable=True)
    return made


def pack(folder: Path, path: Path) -> None:
    """Write a diffusers folder as one file. The file at `path` is replaced atomically."""
    tensors, files = {}, {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".safetensors":
            tensors |= {f"{name}/{key}": tensor.bfloat16() for key, tensor in load_file(file).items()}
        else:
            files[name] = file.read_text()
    part = path.with_suffix(".part")
    save_file(tensors, part, {"format": "pt", "files": json.dumps(files)})
    part.replace(path)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
