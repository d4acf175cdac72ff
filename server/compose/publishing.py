"""The publisher of KV-cache events, in one API process of a replica; readiness and requests depend on it."""

import fcntl
from contextlib import AsyncExitStack
from pathlib import Path

from engine.base import Engine
from engine.replicas.publisher.nats_sink import NatsSink
from engine.replicas.publisher.publisher import Publisher, PublisherConfig
from engine.replicas.publisher.sink import Sink
from routers.state import ReplicaState
from server.metrics.kv_events import KvEventMetrics
from server.metrics.page import ServerMetrics
from server.settings import Settings


def publish_events(
    settings: Settings, metrics: ServerMetrics, replica: ReplicaState, engine: Engine, stack: AsyncExitStack
) -> None:
    """Publish the events of a started engine until `stack` is closed, unless another process of the replica does.

    Raises EngineFailure if an address is taken.
    """
    if not settings.publish_kv_events or not _elected(metrics.folder, stack):
        return
    publisher = Publisher(
        engine,
        PublisherConfig(
            endpoint=settings.kv_events_endpoint,
            replay_endpoint=settings.kv_events_replay_endpoint,
            topic=settings.kv_events_topic,
            buffer=settings.kv_events_buffer,
        ),
        _buses(settings),
    )
    stack.push_async_callback(publisher.close)
    publisher.start()
    replica.checks["kv_events"] = lambda: (
        f"KV-cache events are no longer published: {publisher.failure}." if publisher.failure else ""
    )
    metrics.watch(KvEventMetrics(metrics.registry, replica.model_name, publisher).update)


def _buses(settings: Settings) -> list[Sink]:
    """What carries events besides ZMQ. Raises EngineFailure if its library is not installed."""
    if not settings.nats_url:
        return []
    return [NatsSink(settings.nats_url, settings.nats_subject, settings.kv_events_buffer)]


def _elected(folder: Path | None, stack: AsyncExitStack) -> bool:
    """Return whether this is the only process, or the first to ask of those that share `folder`.

    The lock ends with the process, so that the one that replaces it takes over.
    """
    if folder is None:
        return True
    lock = stack.enter_context((folder / "publisher.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
