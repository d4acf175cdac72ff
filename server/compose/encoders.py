"""Compose the encoding of images (an encoder here, encode replicas, and the service for other replicas) and their
insertion into prompts.
"""

import json
import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from engine.checkpoints.facts import read_model_facts
from engine.config import EncoderConfig, TrtllmEncoderConfig
from engine.encoder import Encoder, EncoderInfo
from engine.errors import EngineFailure
from engine.kit.tasks import in_thread
from engine.replicas.encode_answers import EmbeddingStore, EncodeService, open_arena
from engine.sleep import ReleasableEncoder, SleepingEncoder
from engine.transfer.arena import Arena
from engine.types import EngineInfo
from multimodal.errors import RequestError
from multimodal.media.cache import EmbeddingCache
from multimodal.media.limits import MediaLimits
from multimodal.media.loader import MediaLoader
from multimodal.media.prompts import BackendPrompts, EncodedPrompts
from multimodal.text.control import ControlTokens, unmarked
from multimodal.text.tokenizer import Tokenizer
from server.compose.composition import Composition, Failed, follow_sleep, never
from server.compose.config import engine_config, sleep_config, video_options
from server.compose.model import load_text
from server.health.canary import encoder_probe
from server.metrics.peers import EncodeMetrics, PeerMetrics
from server.metrics.replica import watch_cache
from server.settings import Settings

_LEASE_MARGIN = 5.0
"""Seconds after the longest lease of an answer for which embeddings that it has not released stay with the encoder."""

log = logging.getLogger(__name__)


class Encoders(NamedTuple):
    """The encoder of images for this replica's chats, and the service that encodes for other replicas; either may be
    None."""

    encoder: Encoder | None
    service: EncodeService | None


async def add_encode_service(to: Composition, folder: Path | None) -> Failed:
    """Start the service of an encode replica."""
    to.replica.service = (await start_encoders(to, folder)).service
    return never


async def start_encoders(to: Composition, folder: Path | None) -> Encoders:
    """Start the encoder, if images are encoded apart from the engine, and the service if the role encodes for other
    replicas. Raises EngineFailure if the model of an encode replica takes no images.
    """
    encoder = _encoder(to, folder)
    if encoder is None:
        if not to.role.has_engine:
            raise EngineFailure(f"the model {to.settings.model} takes no images: there is nothing to encode")
        return Encoders(None, None)
    sleeper = None
    if not to.role.has_engine:
        encoder, sleeper = _sleeping(to, encoder)
    if to.settings.encode_urls:
        to.replica.loading = "The model is loading, or no encode replica answers."
    to.stack.push_async_callback(encoder.close)
    await encoder.start()
    if not to.role.serves_encodings:
        return Encoders(encoder, None)
    service = _service(to, encoder)
    to.stack.push_async_callback(service.close)
    if not to.role.has_engine:
        await _add_canary(to, service, encoder, folder)
    if sleeper is not None:
        sleeper.caches.append(service.store.trim)
        await follow_sleep(to, sleeper)
    return Encoders(encoder, service)


def _sleeping(to: Composition, encoder: Encoder) -> tuple[Encoder, SleepingEncoder | None]:
    """Return the encoder of an encode replica as one that can sleep, if the settings allow it. Raises EngineFailure."""
    config = sleep_config(to.settings)
    if config is None:
        return encoder, None
    if to.settings.engine == "trtllm":
        if config.idle_seconds:
            raise EngineFailure("SLEEP_AFTER_IDLE_SECONDS cannot be kept: TensorRT-LLM's encoder keeps its memory")
        return encoder, None
    sleeper = SleepingEncoder(cast("ReleasableEncoder", encoder), config)
    return sleeper, sleeper


def image_prompts(
    to: Composition,
    folder: Path | None,
    encoders: Encoders,
    tokenizer: Tokenizer,
    control: ControlTokens,
    engine: EngineInfo | None = None,
) -> BackendPrompts | EncodedPrompts | None:
    """Return the object that inserts images into prompts, once engine and encoders have started. None if the model
    takes no images. `engine` describes the engine, if there is one here.
    """
    settings, encoder = to.settings, encoders.encoder
    limits = media_limits(settings)
    if encoder is not None and not encoder.info.needs_prompt:
        hidden_size = encoder.info.hidden_size
        cache = EmbeddingCache(int(settings.embedding_cache_mb * (1 << 20)), hidden_size)
        watch_cache(to.metrics.polled, cache)
        loader = MediaLoader(limits, hidden_size)
        return EncodedPrompts(
            encoder,
            loader,
            cache,
            tokenizer,
            control,
            settings.max_images,
            settings.max_request_pixels,
            settings.max_videos,
            settings.max_audios,
            stay=engine is not None and _may_stay(settings, engine),
        )
    facts = read_model_facts(folder) if settings.engine == "trtllm" and folder is not None else None
    if facts is not None and facts.takes_media:
        return BackendPrompts(
            MediaLoader(limits),
            settings.max_images,
            encoder,
            control,
            settings.max_request_pixels,
            engine.max_encoded_images if engine is not None else 0,
            settings.max_videos,
            settings.max_audios,
            [
                *(("image", "video") if facts.takes_images else ()),
                *(("audio",) if "audio_config" in facts.config else ()),
            ],
        )
    return None


def _may_stay(settings: Settings, engine: EngineInfo) -> bool:
    """Return whether embeddings may stay with encode replicas for this engine."""
    if engine.backend != "embedded" or not settings.encode_urls or settings.embedding_transfer == "front":
        return False
    return settings.embedding_transfer == "direct" or engine.device.startswith("cuda")


def media_limits(settings: Settings) -> MediaLimits:
    """Return the limits of files in requests."""
    return MediaLimits(
        max_image_bytes=int(settings.max_image_mb * (1 << 20)),
        max_image_pixels=settings.max_image_pixels,
        max_video_bytes=int(settings.max_video_mb * (1 << 20)),
        max_audio_bytes=int(settings.max_audio_mb * (1 << 20)),
        max_audio_seconds=settings.max_audio_seconds,
        timeout_seconds=settings.media_timeout_seconds,
        concurrency=settings.media_concurrency,
        allowed_hosts=settings.media_allowed_hosts,
        allow_private=settings.media_allow_private,
        local_folder=settings.allowed_local_media_path,
    )


def _has_tower(settings: Settings, folder: Path | None) -> bool:
    """Return whether the model takes media that are encoded apart from the engine. TensorRT-LLM encodes by itself."""
    if settings.engine == "fake":
        return folder is None
    if settings.engine == "trtllm" or folder is None:
        return False
    return not read_model_facts(folder).no_media


def _encoder(to: Composition, folder: Path | None) -> Encoder | None:
    """Return the encoder of images, not yet started: one here, or encode replicas. None if the model takes no images,
    or the backend encodes them itself.
    """
    settings = to.settings
    asks_replicas = bool(settings.encode_urls) and not to.role.serves_encodings
    if settings.engine == "trtllm":
        if not to.role.has_engine:
            return _trtllm_encoder(settings, folder)
        return _remote_encoder(to, info=EncoderInfo()) if asks_replicas else None
    if not _has_tower(settings, folder):
        return None
    if not asks_replicas:
        return _tower(settings, folder, keeps=to.role.serves_encodings)
    local = _tower(settings, folder) if settings.encode_fallback == "local" else None
    return _remote_encoder(to, local=local, arena=open_arena(settings.kv_transfer))


def _remote_encoder(
    to: Composition, local: Encoder | None = None, info: EncoderInfo | None = None, arena: Arena | None = None
) -> Encoder:
    from engine.replicas.encoders import EncodePool, EncoderPool  # noqa: PLC0415 - most replicas do without

    settings, name = to.settings, to.replica.model_name
    pool = EncodePool(
        settings.encode_urls,
        to.internal_secret,
        settings.encode_attempts,
        PeerMetrics(to.metrics.registry, name, "encode"),
        arena,
        settings.transfer_timeout_seconds,
    )
    # No readiness check: once the pool has started, chats without images or with cached ones need no encode replica.
    to.replica.peers["encode"] = lambda: pool.counts
    return EncoderPool(pool, name, settings.engine, local, info)


def _trtllm_encoder(settings: Settings, folder: Path | None) -> Encoder:
    """Return TensorRT-LLM's encoder, in this process or in one of its own."""
    from engine.trtllm.encoder import TrtllmEncoder  # noqa: PLC0415 - other engines do without
    from engine.trtllm.hosted_encoder import HostedEncoder  # noqa: PLC0415

    config = engine_config(settings, folder)
    assert isinstance(config, TrtllmEncoderConfig)
    if settings.engine_process:
        return HostedEncoder(config, settings.engine_address)
    return TrtllmEncoder(config)


def _service(to: Composition, encoder: Encoder) -> EncodeService:
    """Return the service that encodes for other replicas with a started encoder."""
    settings, name = to.settings, to.replica.model_name
    metrics = EncodeMetrics(to.metrics.registry, name)
    arena = None
    if not encoder.info.needs_prompt:  # else the backend moves embeddings by itself
        arena = open_arena(settings.kv_transfer, 0 if to.role.has_engine else settings.kv_transfer_port)
    store = EmbeddingStore(arena, settings.encode_inline_kb << 10, metrics)
    service = EncodeService(name, settings.engine, encoder, store, metrics)
    text = "Requests of other replicas whose images are not encoded yet"
    to.metrics.polled.gauge("trtllm_encode_requests_waiting", text, lambda: service.waiting, "livesum")
    return service


def _tower(settings: Settings, folder: Path | None, *, keeps: bool = False) -> Encoder:
    """Return the encoder of media in this replica. `keeps`: whether embeddings may stay with it for other replicas."""
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
        videos=video_options(settings),
        max_audio_seconds=settings.max_audio_seconds,
        keep=settings.embedding_transfer if keeps else "front",
        keep_mb=settings.embedding_memory_mb,
        keep_from=(settings.encode_inline_kb << 10) + 1,
        keep_seconds=settings.lease_seconds + _LEASE_MARGIN,
    )
    return EmbeddedEncoder(config)


async def _add_canary(to: Composition, service: EncodeService, encoder: Encoder, folder: Path | None) -> None:
    prompt = await _image_prompt(to, folder) if encoder.info.needs_prompt else ""
    if prompt is None:
        log.warning("no canary: the model's chat template shows no image")
        return
    # The canary of an idle replica must not keep it awake.
    encode = partial(encoder.encode, counts=False) if isinstance(encoder, SleepingEncoder) else encoder.encode
    probe = encoder_probe(encode, prompt, audio=encoder.info.audio)
    await to.health.add_canary(probe, lambda: service.served, lambda: _is_awake(to, service), to.stack)


def _is_awake(to: Composition, service: EncodeService) -> bool:
    return service.healthy and to.replica.sleep.phase == "awake"


async def _image_prompt(to: Composition, folder: Path | None) -> str | None:
    """Return a prompt with one image. None without a chat template that shows images, which alone knows the
    placeholder.
    """
    _, template = await in_thread(partial(load_text, to.settings, folder))
    message = {"role": "user", "content": [{"type": "image"}]}
    try:
        return None if template is None else unmarked(template.render([message], add_generation_prompt=True))
    except RequestError as error:
        log.debug("the chat template shows no image", exc_info=error)
        return None
