"""Starts the publisher of KV-cache events in one API process of a replica, and makes readiness and requests depend on it."""

import fcntl
from contextlib import AsyncExitStack
from pathlib import Path

from engine.base import Engine
from engine.replicas.publisher.publisher import Publisher, PublisherConfig
from routers.state import ReplicaState
from server.metrics.kv_events import KvEventMetrics
from server.metrics.page import ServerMetrics
from server.settings import Settings


def publish_events(
    settings: Settings, metrics: ServerMetrics, replica: ReplicaState, engine: Engine, stack: AsyncExitStack
) -> None:
    """Publish the events of a started engine, if that is wanted and no other process of the replica does, until `stack` is closed. Raises
    EngineFailure if an address is taken."""
    if not settings.publish_kv_events or not _elected(metrics.folder, stack):
        return
    publisher = Publisher(
        engine,
        PublisherConfig(
            endpoint=settings.kv_events_endpoint,
            replay_endpoint=settings.kv_events_replay_endpoint,
            topic=settings.kv_events_topic,
            buffer=settings.kv_events_buffer,
            nats_url=settings.nats_url,
            nats_subject=settings.nats_subject,
        ),
    )
    stack.push_async_callback(publisher.close)
    publisher.start()
    replica.checks["kv_events"] = lambda: (
        f"KV-cache events are no longer published: {publisher.failure}." if publisher.failure else ""
    )
    metrics.watch(KvEventMetrics(metrics.registry, replica.model_name, publisher).update)


def _elected(folder: Path | None, stack: AsyncExitStack) -> bool:
    """Whether this is the only process, or of those that share `folder` the first to ask. Its lock goes with it, so that the process that
    replaces a lost one takes over."""
    if folder is None:
        return True
    lock = stack.enter_context((folder / "publisher.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
