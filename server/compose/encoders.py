"""Settings to what encodes images: an encoder here, encode replicas, and what this replica does for others."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

from engine.checkpoints.facts import read_model_facts
from engine.config import EncoderConfig, TrtllmEncoderConfig
from engine.encoder import Encoder, PromptEncoder
from engine.errors import EngineFailure
from engine.kit.tasks import in_thread
from engine.replicas.encode_answers import EmbeddingStore, open_arena
from engine.replicas.encode_service import EncodeService, ImageService, PromptService
from multimodal.errors import RequestError
from server.compose.composition import Composition, Failed, never
from server.compose.config import engine_config
from server.compose.model import load_text
from server.health.canary import Probe, encoder_probe, prompt_encoder_probe
from server.metrics.peers import EncodeMetrics, PeerMetrics
from server.settings import Settings

log = logging.getLogger(__name__)


class Encoders(NamedTuple):
    """What encodes images, as far as there is anything: for chats here, and, as a service, for other replicas."""

    encoder: Encoder | None
    prompt_encoder: PromptEncoder | None
    service: EncodeService | None


async def add_encode_service(to: Composition, folder: Path | None) -> Failed:
    """Start what encodes images for other replicas, and does nothing else."""
    to.replica.service = (await start_encoders(to, folder)).service
    return never


async def start_encoders(to: Composition, folder: Path | None) -> Encoders:
    """Start what encodes images, if the model takes any: for chats here, or for other replicas."""
    encoder = _encoder(to, folder)
    prompt_encoder = _prompt_encoder(to, folder)
    for one in (encoder, prompt_encoder):
        if one is not None:
            if to.settings.encode_urls:
                to.replica.loading = "The model is loading, or no encode replica answers."
            to.stack.push_async_callback(one.close)
            await one.start()
    service = _service(to, encoder, prompt_encoder) if to.role.serves_encodings else None
    if service is not None:
        to.stack.push_async_callback(service.close)
        if not to.role.has_engine:
            await _add_canary(to, service, encoder, prompt_encoder, folder)
    return Encoders(encoder, prompt_encoder, service)


def _has_vision(settings: Settings, folder: Path | None) -> bool:
    """Whether the model takes images that are encoded apart from the engine. TensorRT-LLM encodes by itself."""
    if settings.engine == "fake":
        return folder is None
    if settings.engine == "trtllm" or folder is None:
        return False
    return not read_model_facts(folder).no_images


def _encoder(to: Composition, folder: Path | None) -> Encoder | None:
    """Return what encodes the images of chats, or of other replicas' chats, not yet started; None if the model takes
    none.
    """
    settings, name = to.settings, to.replica.model_name
    if not _has_vision(settings, folder):
        return None
    if to.role.serves_encodings or not settings.encode_urls:
        return _tower(settings, folder)
    from engine.replicas.encoders import EncodePool, EncoderPool  # noqa: PLC0415 - most replicas do without

    peers = EncodePool(
        settings.encode_urls,
        to.internal_secret,
        settings.encode_attempts,
        PeerMetrics(to.metrics.registry, name, "encode"),
        open_arena(settings.kv_transfer),
        settings.transfer_timeout_seconds,
    )
    local = _tower(settings, folder) if settings.encode_fallback == "local" else None
    # No readiness check: once the pool has started, chats without images or with cached ones need no encode replica.
    to.replica.peers["encode"] = lambda: peers.counts
    return EncoderPool(peers, name, settings.engine, local)


def _prompt_encoder(to: Composition, folder: Path | None) -> PromptEncoder | None:
    """Return what encodes all images of a prompt, not yet started: TensorRT-LLM's encoder, on an encode replica, or
    encode replicas.
    """
    settings, name = to.settings, to.replica.model_name
    if settings.engine != "trtllm":
        return None
    if not to.role.has_engine:
        from engine.trtllm.encoder import TrtllmEncoder  # noqa: PLC0415
        from engine.trtllm.hosted_encoder import HostedEncoder  # noqa: PLC0415

        config = engine_config(settings, folder)
        assert isinstance(config, TrtllmEncoderConfig)
        if settings.engine_process:
            return HostedEncoder(config, settings.engine_address, settings.log_level)
        return TrtllmEncoder(config)
    if to.role.serves_encodings or not settings.encode_urls:
        return None
    from engine.replicas.encoders import PromptEncodePool, PromptEncoderPool  # noqa: PLC0415 - most replicas do without

    metrics = PeerMetrics(to.metrics.registry, name, "encode")
    peers = PromptEncodePool(settings.encode_urls, to.internal_secret, settings.encode_attempts, metrics)
    to.replica.peers["encode"] = lambda: peers.counts
    return PromptEncoderPool(peers, name)


def _service(to: Composition, encoder: Encoder | None, prompt_encoder: PromptEncoder | None) -> EncodeService | None:
    """Return what encodes for other replicas, by an encoder that has started; None if the model takes no images.

    Raises EngineFailure if there is nothing else that this replica could do.
    """
    settings, name, alone = to.settings, to.replica.model_name, not to.role.has_engine
    if encoder is None and prompt_encoder is None:
        if alone:
            raise EngineFailure(f"the model {settings.model} takes no images: there is nothing to encode")
        return None
    metrics = EncodeMetrics(to.metrics.registry, name)
    if encoder is None:
        assert prompt_encoder is not None
        return PromptService(name, settings.engine, prompt_encoder, metrics)
    arena = open_arena(settings.kv_transfer, settings.kv_transfer_port if alone else 0)  # else the engine has the port
    store = EmbeddingStore(arena, settings.encode_inline_kb << 10, metrics)
    return ImageService(name, settings.engine, encoder, store, metrics)


def _tower(settings: Settings, folder: Path | None) -> Encoder:
    """Return the model's vision tower in this replica."""
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


async def _add_canary(
    to: Composition,
    service: EncodeService,
    encoder: Encoder | None,
    prompt_encoder: PromptEncoder | None,
    folder: Path | None,
) -> None:
    probe = encoder_probe(encoder) if encoder is not None else await _prompt_probe(to, prompt_encoder, folder)
    if probe is not None:
        await to.health.add_canary(probe, lambda: service.served, lambda: service.healthy, to.stack)


async def _prompt_probe(to: Composition, encoder: PromptEncoder | None, folder: Path | None) -> Probe | None:
    """Return None if the model has no chat template that shows an image: nothing else tells its placeholder."""
    assert encoder is not None, "one of the two"
    _, template = await in_thread(partial(load_text, to.settings, folder))
    message = {"role": "user", "content": [{"type": "image"}]}
    try:
        if template is not None:
            return prompt_encoder_probe(encoder, template.render([message], add_generation_prompt=True))
    except RequestError as error:
        log.debug("the chat template shows no image", exc_info=error)
    log.warning("no canary: the model's chat template shows no image")
    return None
