"""Settings to what encodes images: an encoder here, encode replicas, and what this replica does for others."""

import json
import logging
from pathlib import Path

from prometheus_client import CollectorRegistry

from engine.checkpoints.facts import read_model_facts
from engine.config import EncoderConfig
from engine.encoder import Encoder, PromptEncoder
from engine.errors import EngineFailure
from engine.replicas.encode_answers import EmbeddingStore, open_arena
from engine.replicas.encode_service import EncodeService, ImageService, PromptService
from server.compose.engine import engine_config, internal_secret, served_name
from server.metrics.peers import EncodeMetrics, PeerMetrics
from server.settings import Settings

log = logging.getLogger(__name__)


def has_vision(settings: Settings, folder: Path | None) -> bool:
    """Whether the model takes images that are encoded apart from the engine: TensorRT-LLM encodes by itself."""
    if settings.engine == "fake":
        return folder is None
    if settings.engine == "trtllm" or folder is None:
        return False
    return not read_model_facts(folder).no_images


def encoder(settings: Settings, folder: Path | None, registry: CollectorRegistry) -> Encoder | None:
    """What encodes the images of chats, or of other replicas' chats, not yet started; None if the model takes none."""
    if not has_vision(settings, folder):
        return None
    if settings.disaggregation_mode in ("prefill", "encode") or not settings.encode_urls:
        return _tower(settings, folder)
    from engine.replicas.encoders import EncodePool, EncoderPool  # noqa: PLC0415 - most replicas do without

    name, secret = served_name(settings), internal_secret(settings)
    observer, arena = PeerMetrics(registry, name, "encode"), open_arena(settings.kv_transfer)
    peers = EncodePool(
        settings.encode_urls, secret, settings.encode_attempts, observer, arena, settings.transfer_timeout_seconds
    )
    return EncoderPool(
        peers, name, settings.engine, _tower(settings, folder) if settings.encode_fallback == "local" else None
    )


def prompt_encoder(settings: Settings, folder: Path | None, registry: CollectorRegistry) -> PromptEncoder | None:
    """What encodes the images of a whole prompt, not yet started: TensorRT-LLM's own, on an encode replica, or encode replicas of it."""
    if settings.engine != "trtllm":
        return None
    if settings.disaggregation_mode == "encode":
        from engine.config import TrtllmConfig  # noqa: PLC0415
        from engine.trtllm.encoder import TrtllmEncoder  # noqa: PLC0415
        from engine.trtllm.hosted_encoder import HostedEncoder  # noqa: PLC0415

        config = engine_config(settings, folder)
        assert isinstance(config, TrtllmConfig)
        if settings.engine_process:
            return HostedEncoder(config, settings.engine_address, settings.log_level)
        return TrtllmEncoder(config)
    if settings.disaggregation_mode == "prefill" or not settings.encode_urls:
        return None
    from engine.replicas.encoders import PromptEncodePool, PromptEncoderPool  # noqa: PLC0415 - most replicas do without

    name = served_name(settings)
    peers = PromptEncodePool(
        settings.encode_urls, internal_secret(settings), settings.encode_attempts, PeerMetrics(registry, name, "encode")
    )
    return PromptEncoderPool(peers, name)


def service(
    settings: Settings, encoder: Encoder | None, prompt_encoder: PromptEncoder | None, registry: CollectorRegistry
) -> EncodeService | None:
    """What this replica does for others, by an encoder that has started; None where it does nothing of the kind.

    Raises EngineFailure for an encode replica whose model takes no images.
    """
    if settings.disaggregation_mode not in ("prefill", "encode"):
        return None
    name, alone = served_name(settings), settings.disaggregation_mode == "encode"
    if encoder is None and prompt_encoder is None:
        if alone:
            raise EngineFailure(f"the model {settings.model} takes no images: there is nothing to encode")
        return None
    metrics = EncodeMetrics(registry, name)
    if encoder is None:
        assert prompt_encoder is not None
        return PromptService(name, settings.engine, prompt_encoder, metrics)
    arena = open_arena(settings.kv_transfer, settings.kv_transfer_port if alone else 0)  # else the engine has the port
    return ImageService(
        name, settings.engine, encoder, EmbeddingStore(arena, settings.encode_inline_kb << 10, metrics), metrics
    )


def _tower(settings: Settings, folder: Path | None) -> Encoder:
    """The model's vision tower, in this replica."""
    if settings.engine == "fake":
        from engine.fake.encoder import FakeEncoder  # noqa: PLC0415 - other engines do without

        return FakeEncoder(settings.fake_token_delay_ms / 1e3)
    from engine.embedded.vision.encoder import EmbeddedEncoder  # noqa: PLC0415 - the fake engine does without

    config = EncoderConfig(
        model=str(folder),
        device=settings.device,
        dtype=settings.dtype,
        load_format=settings.load_format,
        threads=settings.threads,
        max_image_pixels=settings.max_image_pixels,
        processor_options=json.loads(settings.image_processor_options or "{}"),
    )
    return EmbeddedEncoder(config, settings.log_level)
