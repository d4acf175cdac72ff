"""Compose what puts media into prompts."""

from pathlib import Path

from engine.checkpoints.facts import read_model_facts
from engine.types import EngineInfo
from multimodal.media.cache import EmbeddingCache
from multimodal.media.limits import MediaLimits
from multimodal.media.loader import MediaLoader
from multimodal.media.prompts import BackendPrompts, EncodedPrompts
from multimodal.text.control import ControlTokens
from multimodal.text.prompts import MediaPrompts
from multimodal.text.tokenizer import Tokenizer
from server.compose.composition import Composition
from server.compose.encoders import Encoders
from server.metrics.embedding_cache import watch_cache


def image_prompts(
    to: Composition,
    folder: Path | None,
    encoders: Encoders,
    tokenizer: Tokenizer,
    control: ControlTokens,
    info: EngineInfo,
) -> MediaPrompts | None:
    """Return what puts images into the prompts of this replica, whose engine and encoders have started. None if the
    model takes no images.
    """
    settings, encoder = to.settings, encoders.encoder
    limits = MediaLimits(
        max_image_bytes=int(settings.max_image_mb * (1 << 20)),
        max_image_pixels=settings.max_image_pixels,
        timeout_seconds=settings.media_timeout_seconds,
        concurrency=settings.media_concurrency,
        allowed_hosts=settings.media_allowed_hosts,
        allow_private=settings.media_allow_private,
        local_folder=settings.allowed_local_media_path,
    )
    if encoder is not None and not encoder.info.needs_prompt:
        hidden_size = encoder.info.hidden_size
        cache = EmbeddingCache(int(settings.embedding_cache_mb * (1 << 20)), hidden_size)
        watch_cache(to.metrics.polled, cache)
        loader = MediaLoader(limits, hidden_size)
        return EncodedPrompts(
            encoder, loader, cache, tokenizer, control, settings.max_images, settings.max_request_pixels
        )
    if settings.engine == "trtllm" and folder is not None and read_model_facts(folder).takes_images:
        return BackendPrompts(
            MediaLoader(limits),
            settings.max_images,
            encoder,
            control,
            settings.max_request_pixels,
            info.max_encoded_images,
        )
    return None
