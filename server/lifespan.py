"""Composes the replica: what the application has while it runs, taken up in order and given back in reverse."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI

from engine.admission import AdmissionEngine
from engine.base import Engine
from engine.config import create_engine
from engine.encoder import Encoder, PromptEncoder
from engine.errors import EngineFailure
from engine.kit.tasks import all_of
from engine.process.child import EngineProcess
from engine.process.client import EngineClient
from engine.replicas.encode_service import EncodeService
from multimodal.metrics import GenerationMetrics
from multimodal.processor import Processor
from multimodal.text.prompts import Prompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import Tokenizer
from routers.fields import FieldCheck
from routers.state import ChatService, HttpOptions, PrefillService, ReplicaState, State
from server import __version__
from server.compose import encoders
from server.compose import engine as compose
from server.compose.publishing import publish_events
from server.compose.routing import add_router
from server.compose.runtime import runtime_of, shown_settings
from server.compose.vision import image_prompts
from server.health.readiness import Health
from server.http.errors import render_event
from server.metrics.page import ServerMetrics
from server.process.tasks import background, in_thread, one_line
from server.settings import Settings

_HEALTH_PAUSE = 1.0

log = logging.getLogger(__name__)


def make_lifespan(
    settings: Settings, metrics: ServerMetrics, at_end: Callable[[], None] | None = None
) -> Callable[[FastAPI], AbstractAsyncContextManager[State]]:
    """The lifespan of an application with these settings. The model loads in a task of its own, so that the port answers at once. `at_end`
    is called, off the event loop, when all else is over.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[State]:
        replica = ReplicaState(compose.served_name(settings), compose.entrance(settings))
        options = HttpOptions(
            max_body_bytes=int(settings.max_body_mb * (1 << 20)),
            body_timeout=settings.body_timeout_seconds,
            ping_interval=settings.sse_ping_seconds,
            lease_seconds=settings.lease_seconds,
            max_images=settings.max_images,
            max_image_bytes=int(settings.max_image_mb * (1 << 20)),
        )
        health = Health(settings, metrics, replica)
        living = live(settings, metrics, replica, health)
        async with (
            health.watching(),
            background(metrics.watch_loop(replica), "event-loop-lag"),
            background(living, "replica"),
        ):
            yield State(
                version=__version__,
                replica=replica,
                http=options,
                render_error=render_event,
                render_metrics=metrics.render,
                runtime=partial(runtime_of, settings, replica),
                settings=shown_settings(settings),
            )
        if at_end is not None:
            await in_thread(at_end)

    return lifespan


class _Encoders(NamedTuple):
    """What encodes images, as far as there is anything: for chats here, and, as a service, for other replicas."""

    encoder: Encoder | None
    prompt_encoder: PromptEncoder | None
    service: EncodeService | None


async def live(settings: Settings, metrics: ServerMetrics, replica: ReplicaState, health: Health) -> None:
    """The replica's life, from loading the model until cancelled. If that ends early, `replica.failure` says why."""
    try:
        async with AsyncExitStack() as stack:
            # Whoever started an engine at an address has the model ready when it answers.
            folder = None if settings.engine_address else await in_thread(partial(compose.model_folder, settings))
            failed: Callable[[], Awaitable[str]] = _never
            if compose.has_engine(settings):
                failed = await _serve(settings, metrics, replica, health, folder, stack)
            elif compose.has_model(settings):
                replica.service = (await _add_encoders(settings, metrics, replica, health, folder, stack)).service
            else:
                await add_router(settings, metrics, replica, folder, stack)
            raise EngineFailure(await failed())
    except Exception as error:  # whatever it was: the server cannot go on, and says why
        replica.failure = one_line(error)
        log.debug("the replica failed", exc_info=error)


async def _serve(
    settings: Settings,
    metrics: ServerMetrics,
    replica: ReplicaState,
    health: Health,
    folder: Path | None,
    stack: AsyncExitStack,
) -> Callable[[], Awaitable[str]]:
    """Start what answers requests for tokens. Returns a call that returns a reason once it has failed for good."""
    local, failed = await _open_engine(settings, folder, stack)
    inner = compose.serving_engine(settings, local, metrics.registry)
    engine = AdmissionEngine(inner, settings.max_queue_size, settings.queue_timeout_seconds)
    stack.push_async_callback(engine.close)
    starting: list[Coroutine[Any, Any, Any]] = [engine.start()]
    if settings.engine_address:
        await all_of(starting)
        folder, starting = await in_thread(partial(compose.model_folder, settings)), []
    found = await all_of(
        [_text(settings, folder), _add_encoders(settings, metrics, replica, health, folder, stack), *starting]
    )
    text: tuple[Tokenizer, ChatTemplate | None] | None = found[0]
    encoding: _Encoders = found[1]
    await stack.enter_async_context(background(metrics.watch_engine(engine), "engine-statistics"))
    await health.add_engine(local, inner, stack)
    service: ChatService | PrefillService = PrefillService(engine=engine, encoding=encoding.service)
    if text is not None:
        service = _chat_service(settings, metrics, replica.model_name, engine, text, encoding, folder, stack)
    publish_events(settings, metrics, replica, engine, stack)
    replica.service = service
    return failed


def _chat_service(
    settings: Settings,
    metrics: ServerMetrics,
    name: str,
    engine: AdmissionEngine,
    text: tuple[Tokenizer, ChatTemplate | None],
    encoding: _Encoders,
    folder: Path | None,
    stack: AsyncExitStack,
) -> ChatService:
    images = image_prompts(settings, folder, encoding.encoder, encoding.prompt_encoder, text[0], metrics)
    if images is not None:
        stack.push_async_callback(images.aclose)
    processor = Processor(
        engine,
        Prompts(*text, images),
        compose.limits(settings),
        name,
        GenerationMetrics(metrics.registry, name),
        compose.default_processors(settings),
    )
    return ChatService(
        engine=engine,
        processor=processor,
        fields=FieldCheck(name, strict=settings.strict_fields),
        images=images,
        encoder=encoding.encoder or encoding.prompt_encoder,
    )


async def _text(settings: Settings, folder: Path | None) -> tuple[Tokenizer, ChatTemplate | None] | None:
    """What makes text of tokens and tokens of text, where that is done."""
    return await in_thread(partial(compose.load_text, settings, folder)) if compose.has_text(settings) else None


async def _add_encoders(
    settings: Settings,
    metrics: ServerMetrics,
    replica: ReplicaState,
    health: Health,
    folder: Path | None,
    stack: AsyncExitStack,
) -> _Encoders:
    """Start what encodes images, if the model takes any, for chats here or for other replicas."""
    encoder = encoders.encoder(settings, folder, metrics.registry)
    prompt_encoder = encoders.prompt_encoder(settings, folder, metrics.registry)
    for one in (encoder, prompt_encoder):
        if one is not None:
            if settings.encode_urls:
                replica.loading = "The model is loading, or no encode replica answers."
            stack.push_async_callback(one.close)
            await one.start()
    service = encoders.service(settings, encoder, prompt_encoder, metrics.registry)
    if service is not None:
        stack.push_async_callback(service.close)
    await health.add_encoders(encoder, prompt_encoder, service, folder, stack)
    return _Encoders(encoder, prompt_encoder, service)


async def _open_engine(
    settings: Settings, folder: Path | None, stack: AsyncExitStack
) -> tuple[Engine, Callable[[], Awaitable[str]]]:
    """The engine, not yet started, and a call that returns a reason once it has failed for good."""
    if settings.engine_address:
        return EngineClient(settings.engine_address), _never
    config = compose.engine_config(settings, folder)
    if not settings.engine_process:
        engine = create_engine(config)
        return engine, partial(_illness, engine)
    process = EngineProcess(config, on_death=settings.engine_on_death, log_level=settings.log_level)
    stack.push_async_callback(process.close)
    await process.start()
    return EngineClient(process.address, process.wait_failed), process.wait_failed


async def _never() -> str:
    never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return await never


async def _illness(engine: Engine) -> str:
    """Wait until an engine in this process has stopped working."""
    while engine.healthy:  # noqa: ASYNC110 - an engine has no event for it
        await asyncio.sleep(_HEALTH_PAUSE)
    return "the engine has stopped working"
