"""Compose the publisher of KV-cache events, which runs in one API process of a replica."""

import fcntl
from contextlib import AsyncExitStack
from pathlib import Path

from engine.base import Engine
from engine.replicas.publisher.nats_sink import NatsSink
from engine.replicas.publisher.publisher import Publisher, PublisherConfig
from server.compose.composition import Composition
from server.metrics.kv_events import watch_publisher


def publish_events(to: Composition, engine: Engine) -> None:
    """Publish the KV-cache events of a started engine, if enabled and no other process of the replica does. Raises
    EngineFailure if an address is in use, or if NATS is configured and its library not installed.
    """
    settings = to.settings
    if not settings.publish_kv_events or not _elected(to.metrics.folder, to.stack):
        return
    bus = NatsSink(settings.nats_url, settings.nats_subject, settings.kv_events_buffer) if settings.nats_url else None
    publisher = Publisher(
        engine,
        PublisherConfig(
            endpoint=settings.kv_events_endpoint,
            replay_endpoint=settings.kv_events_replay_endpoint,
            topic=settings.kv_events_topic,
            buffer=settings.kv_events_buffer,
        ),
        [bus] if bus is not None else [],
    )
    to.stack.push_async_callback(publisher.close)
    publisher.start()
    to.health.check(
        "kv_events",
        lambda: f"KV-cache events are no longer published: {publisher.failure}." if publisher.failure else "",
    )
    watch_publisher(to.metrics.polled, publisher)


def _elected(folder: Path | None, stack: AsyncExitStack) -> bool:
    """Return whether this process publishes: the only one, or the first to lock a file in the shared `folder`. The lock
    ends with the process, so that its successor can publish.
    """
    if folder is None:
        return True
    lock = stack.enter_context((folder / "publisher.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
