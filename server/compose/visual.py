"""Compose an engine of pictures and videos, and the store of its files."""

import dataclasses
import hashlib
import json
from pathlib import Path

from engine.kit.tasks import background
from engine.process.child import ServiceProcess
from engine.visual.base import VisualEngine
from engine.visual.service import VISUAL, VisualClient, create_visual_engine
from engine.visual.types import VisualConfig
from multimodal.media.loader import MediaLoader
from routers.fields import FieldCheck
from routers.state import VisualService
from routers.visual.drawing import VisualLimits
from routers.visual.jobs import VideoJobs
from routers.visual.media import MediaStore, clean_for_ever
from routers.visual.worker import VideoWorker
from server.compose.composition import Composition, Failed, never
from server.compose.encoders import media_limits
from server.http.errors import render_event
from server.metrics.replica import watch_engine_process
from server.metrics.visual import watch_visual
from server.settings import Settings

_KEYS_SHARE = 4
"""If there are several API keys, the videos that wait or are made are this many times those that one key may have."""


async def add_visual(to: Composition, folder: Path | None) -> Failed:
    """Start the engine and set the replica's service."""
    settings = to.settings
    engine, failed = await _open_engine(to, folder)
    to.health.check("engine", lambda: "" if engine.healthy else "The engine is restarting, or does not answer.")
    to.stack.push_async_callback(engine.close)
    await engine.start()
    media = _media_store(to)
    loader = MediaLoader(media_limits(settings))
    to.stack.push_async_callback(loader.aclose)
    await to.stack.enter_async_context(background(clean_for_ever(media), "media-store"))
    jobs = VideoJobs(media, settings.video_max_jobs, _own_jobs(settings))
    limits = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(VisualLimits)
        if field.name != "max_image_bytes"
    }
    service = VisualService(
        engine=engine,
        fields=FieldCheck(to.replica.model_name, strict=settings.strict_fields, model_optional=settings.model_optional),
        media=media,
        loader=loader,
        videos=jobs,
        limits=VisualLimits(**limits, max_image_bytes=int(settings.max_image_mb * (1 << 20))),
        timeout_seconds=settings.request_timeout_seconds,
    )
    worker = VideoWorker(
        jobs=jobs,
        engine=engine,
        timeout_seconds=settings.video_timeout_seconds,
        render_error=render_event,
        ready=lambda: not to.replica.draining and engine.healthy,
    )
    await to.stack.enter_async_context(background(worker.run(), "videos"))
    await to.stack.enter_async_context(watch_visual(to.metrics.polled, engine, lambda: worker.ended))
    to.replica.service = service
    return failed


def visual_config(settings: Settings, folder: Path | None) -> VisualConfig:
    """Return the configuration of the engine."""
    backend = settings.engine if settings.engine != "embedded" else "diffusers"
    return VisualConfig(
        backend=backend,
        model=str(folder or "fake"),
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        max_batch=settings.visual_max_batch,
        max_queue=settings.visual_max_queue,
        steps=settings.visual_steps,
        guidance=settings.visual_guidance,
        step_cache=settings.visual_step_cache,
        cfg_batching=settings.visual_cfg_batching,
        max_image_pixels=settings.max_image_pixels,
        arguments=json.loads(settings.visual_engine_args or "{}"),
        hang_seconds=settings.engine_hang_seconds,
        step_seconds=settings.fake_token_delay_ms / 1e3,
    )


async def _open_engine(to: Composition, folder: Path | None) -> tuple[VisualEngine, Failed]:
    """Return the engine, not yet started: in this process, or in a process that is started."""
    config = visual_config(to.settings, folder)
    if not to.settings.engine_process:
        return create_visual_engine(config), never
    process = ServiceProcess(VISUAL, config, on_death=to.settings.engine_on_death)
    watch_engine_process(to.metrics.polled, process)
    to.stack.push_async_callback(process.close)
    await process.start()
    return VisualClient(process.address, process.wait_failed), process.wait_failed


def _own_jobs(settings: Settings) -> int:
    """Return how many videos of a key may wait or be made, so that one key cannot fill the queue."""
    several = len(settings.api_keys) > 1
    return max(1, settings.video_max_jobs // _KEYS_SHARE) if several else settings.video_max_jobs


def _media_store(to: Composition) -> MediaStore:
    """Return the store that all replicas of a model on this machine share."""
    settings = to.settings
    model = hashlib.sha256(to.replica.model_name.encode()).hexdigest()[:16]
    folder = settings.cache_dir / "media" / model
    store = MediaStore(folder, settings.media_store_mb << 20, settings.media_store_hours * 3600)
    to.stack.push_async_callback(store.close)
    return store
