"""Tiny pipelines of diffusers with random weights, as folders."""

import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "circle", "square", "on", "white"]


def _tokenizer(length: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def _text_encoder(width: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(vocab_size=len(WORDS), d_model=width, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dense_act_fn="gelu")
    )


def _vae(channels: int = 4) -> object:
    from diffusers import AutoencoderKL  # noqa: PLC0415 - an extra

    return AutoencoderKL(
        block_out_channels=(8, 8),
        latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=32,
    )


def pixart(folder: Path) -> Path:
    """A diffusion transformer over texts: pictures of 32 x 32 pixels."""
    from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel  # noqa: PLC0415

    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        sample_size=16,
        num_layers=3,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=16,
        cross_attention_dim=16,
        in_channels=4,
        out_channels=8,
        norm_type="ada_norm_single",
        use_additional_conditions=False,
    )
    _awaken(transformer)
    PixArtAlphaPipeline(
        tokenizer=_tokenizer(12),
        text_encoder=_text_encoder(16),
        vae=_vae(),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
    ).save_pretrained(folder)
    return folder


def stable_diffusion(folder: Path) -> Path:
    """A UNet: pictures of 16 x 16 pixels, which it can change, too."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel  # noqa: PLC0415

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=12,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        StableDiffusionPipeline(
            vae=_vae(),
            text_encoder=text,
            tokenizer=_tokenizer(12),
            unet=unet,
            scheduler=DDIMScheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ).save_pretrained(folder)
    return folder


def latte(folder: Path) -> Path:
    """A diffusion transformer over clips: frames of 32 x 32 pixels."""
    from diffusers import DDIMScheduler, LattePipeline, LatteTransformer3DModel  # noqa: PLC0415

    torch.manual_seed(0)
    transformer = LatteTransformer3DModel(
        sample_size=16,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=16,
        cross_attention_dim=16,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        num_embeds_ada_norm=1000,
    )
    _awaken(transformer)
    LattePipeline(
        tokenizer=_tokenizer(12),
        text_encoder=_text_encoder(16),
        vae=_vae(),
        transformer=transformer,
        scheduler=DDIMScheduler(),
    ).save_pretrained(folder)
    return folder


def ltx(folder: Path) -> Path:
    """A diffusion transformer over clips of 32 x 32 pixels, which may begin with a picture."""
    from diffusers import (  # noqa: PLC0415
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    torch.manual_seed(0)
    blocks, scaled = (8, 8, 8, 8), (True, True, False, False)
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=blocks,
        decoder_block_out_channels=blocks,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=scaled,
        decoder_spatio_temporal_scaling=scaled,
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=1,
        patch_size_t=1,
    )
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=16,
    )
    _awaken(transformer)
    LTXPipeline(
        tokenizer=_tokenizer(12),
        text_encoder=_text_encoder(16),
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    ).save_pretrained(folder)
    return folder


def _awaken(model: torch.nn.Module) -> None:
    """Give weights that begin as zeros other values, so that all inputs count."""
    with torch.no_grad():
        for weights in model.parameters():
            if not weights.any():
                weights.normal_(std=0.2)
