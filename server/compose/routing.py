"""Settings to a router: the replicas it chooses among, and what it knows of prompts."""

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from engine.replicas.client import Header
from engine.replicas.discovery import Addresses
from engine.replicas.routing.fleet import EventSources, Fleet
from engine.replicas.routing.policy import Policy
from engine.replicas.routing.sessions import Sessions
from multimodal.text.routed_prompts import RoutedPrompts
from routers.state import ReplicaState, RouterService
from server.compose import engine as compose
from server.metrics.page import ServerMetrics
from server.metrics.routing import RoutingMetrics
from server.process.tasks import in_thread
from server.settings import Settings

_MAX_SESSIONS = 1 << 16


async def add_router(
    settings: Settings, metrics: ServerMetrics, replica: ReplicaState, folder: Path | None, stack: AsyncExitStack
) -> None:
    """Find the replicas and have `replica` forward to them, until `stack` is closed."""
    tokenizer, template = await in_thread(partial(compose.load_text, settings, folder))
    observer = RoutingMetrics(metrics.registry, replica.model_name)
    fleet = _fleet(settings, observer)
    stack.push_async_callback(fleet.close)
    await fleet.start()
    metrics.watch(lambda: observer.update(fleet))
    replica.checks["replicas"] = lambda: "" if fleet.healthy else "No replica is ready."
    replica.peers["replica"] = lambda: fleet.counts
    prompts = RoutedPrompts(replica.model_name, tokenizer, template, settings.chat_template_kwargs)
    replica.service = RouterService(fleet=fleet, prompts=prompts, session_header=settings.session_header)


def _fleet(settings: Settings, observer: RoutingMetrics) -> Fleet:
    sources = EventSources(
        settings.route_events,
        settings.route_replays,
        settings.route_events_port,
        settings.route_replay_port,
        settings.kv_events_topic,
    )
    return Fleet(
        Addresses(settings.route_urls),
        sources,
        Policy(settings.route_policy, settings.route_overlap_weight, settings.route_temperature),
        observer,
        _key(settings),
        settings.route_attempts,
        Sessions(_MAX_SESSIONS, settings.session_seconds),
    )


def _key(settings: Settings) -> list[Header]:
    """Replicas have the same API keys; requests bring one of their own, probes do not."""
    return [(b"authorization", b"Bearer " + key.get_secret_value().encode()) for key in settings.api_keys[:1]]
