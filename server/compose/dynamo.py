"""Compose the replica's part in a Dynamo graph, beside HTTP: the same engine and the same settings."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from engine.encoder import Encoder
from engine.errors import EngineFailure
from engine.kit.tasks import in_thread
from engine.replicas.encode_answers import EncodeService, open_arena
from engine.sleep import SleepingEncoder
from engine.types import EngineInfo
from multimodal.media.prompts import BackendPrompts, EncodedPrompts
from multimodal.request import Limits
from multimodal.text.prompts import MediaPrompts
from routers.state import ChatService, PrefillService
from server.compose.composition import Composition
from server.compose.config import default_processors
from server.compose.encoders import Encoders, image_prompts
from server.compose.model import load_text, model_folder, sampling_defaults
from server.settings import Settings

if TYPE_CHECKING:
    from routers.dynamo.images import BackendImages, GraphImages, OfferedEmbeddings
    from routers.dynamo.worker import Card, DynamoGraph, GraphWorker, WorkerRole


_ETCD_SECONDS = 120.0
"""Seconds to wait for etcd, which may be starting too."""
_CONNECT_SECONDS = 2.0
_COMPONENTS = {"prefill": "prefill", "encode": "encode"}
_ETCD_PORT = 2379

log = logging.getLogger(__name__)


async def open_graph(to: Composition) -> DynamoGraph:
    """Return Dynamo's runtime, connected. Raises EngineFailure if its services cannot be reached."""
    if to.settings.dynamo_discovery == "etcd":  # the runtime itself would wait with this process standing still
        await wait_for_etcd(to.settings.dynamo_etcd)
    from routers.dynamo.worker import DynamoGraph, GraphConfig  # noqa: PLC0415 - an extra, and most replicas do without

    settings = to.settings
    config = GraphConfig(
        namespace=settings.dynamo_namespace,
        component=settings.dynamo_component or _COMPONENTS.get(to.role.name, "backend"),
        endpoint=settings.dynamo_endpoint,
        discovery=settings.dynamo_discovery,
        request_plane=settings.dynamo_request_plane,
        event_plane=settings.dynamo_event_plane,
    )
    graph = DynamoGraph.open(config)
    to.stack.callback(graph.runtime.shutdown)
    return graph


async def join(to: Composition, graph: DynamoGraph, folder: Path | None) -> None:
    """Join the graph with the service of a started replica as a worker. Raises EngineFailure."""
    if folder is None:
        folder = await in_thread(lambda: model_folder(to.settings))
    if folder is None:
        raise EngineFailure("DYNAMO needs a model with a folder: its frontend reads the tokenizer there")
    service = to.replica.service
    worker = await (
        _encode_worker(to, graph, folder, service)
        if isinstance(service, EncodeService)
        else _engine_worker(to, graph, folder, service)
    )
    to.stack.push_async_callback(worker.close)
    await worker.start()
    to.health.check("dynamo", worker.failure)


async def _engine_worker(to: Composition, graph: DynamoGraph, folder: Path, service: Any) -> GraphWorker:
    from routers.dynamo.engine_worker import EngineWorker  # noqa: PLC0415 - an extra, and most replicas do without

    settings = to.settings
    assert isinstance(service, ChatService | PrefillService), "the role has been checked"
    processor = service.processor if isinstance(service, ChatService) else None
    if isinstance(service, ChatService):
        prompts, offered = service.images, None
    else:
        encoder = service.encoding.encoder if service.encoding is not None else None
        prompts = await _prompts(to, folder, encoder, service.engine.info)
        offered = None if service.encoding is None else _offered(to, graph, service.encoding)
    tools, reasoning = ("", "") if processor is None else processor.format.parser_names
    refused = dict(service.engine.info.refused_parameters)
    return EngineWorker(
        graph,
        cast("WorkerRole", to.role.name),
        service.engine,
        to.replica,
        _card(to, folder, tools, reasoning),
        limits=_limits(settings),
        images=_images(to, graph, prompts),
        offered=offered,
        processors=default_processors(settings),
        defaults=sampling_defaults(settings, folder, refused) if processor is None else processor.defaults,
        metrics=None if processor is None else processor.metrics,
        lease_seconds=settings.lease_seconds,
        drain_seconds=settings.dynamo_drain_seconds,
    )


async def _encode_worker(to: Composition, graph: DynamoGraph, folder: Path, service: EncodeService) -> GraphWorker:
    from routers.dynamo.encode_worker import EncodeWorker  # noqa: PLC0415 - an extra, and most replicas do without
    from routers.dynamo.images import GraphImages  # noqa: PLC0415

    settings = to.settings
    prompts = await _prompts(to, folder, service.encoder)
    if isinstance(to.replica.sleeper, SleepingEncoder) and isinstance(prompts, EncodedPrompts):
        to.replica.sleeper.caches.append(prompts.cache.clear)
    images = _images(to, graph, prompts)
    if not isinstance(images, GraphImages):
        raise EngineFailure(
            f"an encode worker of a Dynamo graph needs an engine that takes embeddings: {settings.engine}"
        )
    return EncodeWorker(
        graph,
        service,
        to.replica,
        _card(to, folder),
        images,
        _offered(to, graph, service),
        seconds=settings.request_timeout_seconds,
        drain_seconds=settings.dynamo_drain_seconds,
    )


def _card(to: Composition, folder: Path, tools: str = "", reasoning: str = "") -> Card:
    from routers.dynamo import worker as dynamo  # noqa: PLC0415 - an extra, and most replicas do without

    settings = to.settings
    return dynamo.Card(
        folder=folder,
        name=to.replica.model_name,
        chat_template=settings.chat_template,
        tool_parser=dynamo.tool_parser(settings.dynamo_tool_parser, tools),
        reasoning_parser=dynamo.reasoning_parser(settings.dynamo_reasoning_parser, reasoning),
        kv_events=settings.dynamo_kv_events,
    )


def _limits(settings: Settings) -> Limits:
    return Limits(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)})


async def _prompts(
    to: Composition, folder: Path, encoder: Encoder | None, engine: EngineInfo | None = None
) -> MediaPrompts | None:
    """Return the object that inserts images into prompts, for a role that gets images only in a graph."""
    tokenizer, template = await in_thread(lambda: load_text(to.settings, folder))
    control = None if template is None else template.control
    if control is None:
        return None
    images = image_prompts(to, folder, Encoders(encoder, None), tokenizer, control, engine)
    if images is not None:
        to.stack.push_async_callback(images.aclose)
    return images


def _images(to: Composition, graph: DynamoGraph, images: MediaPrompts | None) -> GraphImages | BackendImages | None:
    from routers.dynamo.images import BackendImages, GraphImages  # noqa: PLC0415 - most replicas do without

    settings = to.settings
    if isinstance(images, BackendPrompts):
        return BackendImages(images)
    if not isinstance(images, EncodedPrompts):
        return None
    return GraphImages(
        images,
        to.replica.model_name,
        settings.engine,
        open_arena(settings.kv_transfer) if to.role.has_engine else None,
        settings.transfer_timeout_seconds,
        give_up=None if to.role.prefill_only else graph.give_up,  # decode needs them after prefill
    )


def _offered(to: Composition, graph: DynamoGraph, service: EncodeService) -> OfferedEmbeddings:
    from routers.dynamo import worker as dynamo  # noqa: PLC0415 - an extra, and most replicas do without
    from routers.dynamo.images import OfferedEmbeddings  # noqa: PLC0415

    instance = graph.generate.connection_id
    return OfferedEmbeddings(service.store, to.settings.lease_seconds, service.info, graph.path(dynamo.LEASE), instance)


async def wait_for_etcd(addresses: Sequence[str], seconds: float = _ETCD_SECONDS) -> None:
    """Wait until one of the addresses accepts connections. Raises EngineFailure if none does in time."""
    where = ", ".join(addresses)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not await any_answers(addresses):
                log.warning("waiting for etcd at %s", where)
                await asyncio.sleep(_CONNECT_SECONDS)
            return
    raise EngineFailure(
        f"DYNAMO needs etcd, and nothing answers at {where}: set ETCD_ENDPOINTS, or have the graph found otherwise "
        "(DYNAMO_DISCOVERY=kubernetes, or file on one machine)"
    )


async def any_answers(addresses: Sequence[str]) -> bool:
    """Return whether one of the addresses, http://host:port, accepts connections."""
    return any([await _answers(address) for address in addresses])


async def _answers(address: str) -> bool:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or _ETCD_PORT)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
