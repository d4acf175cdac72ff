"""Compose the replica's part in a Dynamo graph, beside HTTP: the same engine and the same settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine.errors import EngineFailure
from multimodal.request import Limits
from routers.state import ChatService, PrefillService
from server.compose.composition import Composition
from server.compose.config import default_processors

if TYPE_CHECKING:
    from routers.dynamo.worker import DynamoGraph, WorkerRole


def open_graph(to: Composition) -> DynamoGraph:
    """Return the runtime by which the replica joins. Raises EngineFailure if its services cannot be reached."""
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
    graph = DynamoGraph(config)
    to.stack.callback(graph.runtime.shutdown)
    return graph


async def join(to: Composition, graph: DynamoGraph, folder: Path | None) -> None:
    """Make the service of a replica, which has started, a worker of the graph. Raises EngineFailure."""
    from routers.dynamo.worker import Card, GraphWorker  # noqa: PLC0415 - an extra, and most replicas do without

    settings, service = to.settings, to.replica.service
    assert isinstance(service, ChatService | PrefillService), "the role has been checked"
    if folder is None:
        raise EngineFailure("DYNAMO needs a model with a folder: its frontend reads the tokenizer there")
    processor = service.processor if isinstance(service, ChatService) else None
    limits = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)}
    worker = GraphWorker(
        graph,
        cast("WorkerRole", to.role.name),
        service.engine,
        to.replica,
        Card(
            folder=folder,
            name=to.replica.model_name,
            chat_template=settings.chat_template,
            tool_parser=settings.dynamo_tool_parser,
            reasoning_parser=settings.dynamo_reasoning_parser,
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
