"""The lifespan of a replica: its parts are composed in order and closed in reverse."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from fastapi import FastAPI
from starlette.types import Scope

from engine.errors import EngineFailure
from engine.kit.tasks import background, in_thread
from engine.process.child import SpareHost
from routers.state import HttpOptions, MessageClock, ReplicaState, State
from server import __version__
from server.compose.composition import Composition
from server.compose.dynamo import join, open_graph
from server.compose.encoders import add_encode_service
from server.compose.engine import add_engine
from server.compose.model import model_folder, served_name
from server.compose.routing import add_router
from server.compose.runtime import runtime_of, shown_settings
from server.compose.visual import add_visual
from server.health.readiness import Health
from server.http.errors import render_event, status_of
from server.metrics.page import ServerMetrics
from server.process.logs import one_line
from server.roles import role_of
from server.settings import Settings

COMPOSERS = {"engine": add_engine, "encoder": add_encode_service, "router": add_router, "visual": add_visual}
"""Composers of the core of a replica, by `Role.core`."""

log = logging.getLogger(__name__)


def make_lifespan(
    settings: Settings,
    metrics: ServerMetrics,
    begin_message: Callable[[Scope, str, int], MessageClock],
    at_end: Callable[[], None] | None = None,
    spare: SpareHost | None = None,
) -> Callable[[FastAPI], AbstractAsyncContextManager[State]]:
    """Return the lifespan of an application. The model loads in a task of its own, so that the port answers at once.
    `at_end` is called last, in a thread. `spare` is a process for the engine.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[State]:
        role = role_of(settings)
        replica = ReplicaState(served_name(settings), role.entrance)
        health = Health(settings, role, metrics, replica)
        composition = Composition(settings, role, replica, metrics, health, AsyncExitStack(), spare)
        async with (
            health.watching(),
            background(metrics.watch_loop(), "event-loop-lag"),
            background(live(composition), "replica"),
        ):
            yield State(
                version=__version__,
                replica=replica,
                http=http_options(settings),
                render_error=render_event,
                status_of=status_of,
                begin_message=begin_message,
                render_metrics=metrics.render,
                runtime=partial(runtime_of, settings, replica),
                settings=shown_settings(settings),
                profile_dir=settings.profile_dir and settings.profile_dir.resolve(),
            )
        if at_end is not None:
            await in_thread(at_end)

    return lifespan


async def live(to: Composition) -> None:
    """Compose the replica and wait until cancelled. If something fails for good, `replica.failure` says why."""
    try:
        async with to.stack:
            # Whoever started an engine at an address has the model ready when it answers.
            folder = None if to.settings.engine_address else await in_thread(partial(model_folder, to.settings))
            if to.settings.dynamo:
                to = replace(to, graph=await open_graph(to))
            failed = await COMPOSERS[to.role.core](to, folder)
            if to.graph is not None:
                await join(to, to.graph, folder)
            raise EngineFailure(await failed())
    except Exception as error:  # of any kind: the server cannot go on, and reports why
        to.replica.failure = one_line(error)
        log.debug("the replica failed", exc_info=error)


def http_options(settings: Settings) -> HttpOptions:
    return HttpOptions(
        max_body_bytes=int(settings.max_body_mb * (1 << 20)),
        body_timeout=settings.body_timeout_seconds,
        ping_interval=settings.sse_ping_seconds,
        lease_seconds=settings.lease_seconds,
        max_images=settings.max_images,
        max_image_bytes=int(settings.max_image_mb * (1 << 20)),
        max_video_bytes=int(settings.max_video_mb * (1 << 20)),
        max_audio_bytes=int(settings.max_audio_mb * (1 << 20)),
        max_text_bytes=int(settings.max_text_mb * (1 << 20)),
        max_values=settings.max_body_values,
    )
