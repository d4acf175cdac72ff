"""Compose the replica's part in a Dynamo graph, beside HTTP: the same engine and the same settings."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from engine.errors import EngineFailure
from engine.kit.tasks import in_thread
from multimodal.request import Limits
from routers.state import ChatService, PrefillService
from server.compose.composition import Composition
from server.compose.config import default_processors
from server.compose.model import model_folder

if TYPE_CHECKING:
    from routers.dynamo.worker import DynamoGraph, WorkerRole


_ETCD_SECONDS = 120.0
"""Seconds to wait for etcd, which may be starting too."""
_CONNECT_SECONDS = 2.0
_ETCD_PORT = 2379

log = logging.getLogger(__name__)


async def open_graph(to: Composition) -> DynamoGraph:
    """Return the runtime by which the replica joins. Raises EngineFailure if its services cannot be reached."""
    if to.settings.dynamo_discovery == "etcd":  # the runtime itself would wait with this process standing still
        await wait_for_etcd(to.settings.dynamo_etcd)
    from routers.dynamo.worker import DynamoGraph, GraphConfig  # noqa: PLC0415 - an extra, and most replicas do without

    settings = to.settings
    config = GraphConfig(
        namespace=settings.dynamo_namespace,
        component=settings.dynamo_component or ("prefill" if to.role.prefill_only else "backend"),
        endpoint=settings.dynamo_endpoint,
        discovery=settings.dynamo_discovery,
        request_plane=settings.dynamo_request_plane,
        event_plane=settings.dynamo_event_plane,
    )
    graph = DynamoGraph.open(config)
    to.stack.callback(graph.runtime.shutdown)
    return graph


async def join(to: Composition, graph: DynamoGraph, folder: Path | None) -> None:
    """Make the service of a replica, which has started, a worker of the graph. Raises EngineFailure."""
    from routers.dynamo import worker as dynamo  # noqa: PLC0415 - an extra, and most replicas do without

    settings, service = to.settings, to.replica.service
    assert isinstance(service, ChatService | PrefillService), "the role has been checked"
    if folder is None:
        folder = await in_thread(lambda: model_folder(settings))
    if folder is None:
        raise EngineFailure("DYNAMO needs a model with a folder: its frontend reads the tokenizer there")
    processor = service.processor if isinstance(service, ChatService) else None
    tools, reasoning = ("", "") if processor is None else processor.format.parser_names
    limits = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)}
    worker = dynamo.GraphWorker(
        graph,
        cast("WorkerRole", to.role.name),
        service.engine,
        to.replica,
        dynamo.Card(
            folder=folder,
            name=to.replica.model_name,
            chat_template=settings.chat_template,
            tool_parser=dynamo.tool_parser(settings.dynamo_tool_parser, tools),
            reasoning_parser=dynamo.reasoning_parser(settings.dynamo_reasoning_parser, reasoning),
            kv_events=settings.dynamo_kv_events,
        ),
        limits=Limits(**limits),
        processors=default_processors(settings),
        metrics=None if processor is None else processor.metrics,
        lease_seconds=settings.lease_seconds,
        drain_seconds=settings.dynamo_drain_seconds,
    )
    to.stack.push_async_callback(worker.close)
    await worker.start()
    to.health.check("dynamo", worker.failure)


async def wait_for_etcd(addresses: Sequence[str], seconds: float = _ETCD_SECONDS) -> None:
    """Return once one of the addresses takes connections. Raises EngineFailure if none does in time."""
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
    """Return whether one of the addresses, http://host:port, takes connections."""
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
