"""Compose a router: the replicas that it chooses from, and how it reads prompts."""

from functools import partial
from pathlib import Path

from engine.kit.tasks import in_thread
from engine.replicas.client import Header
from engine.replicas.discovery import Addresses
from engine.replicas.routing.fleet import EventSources, Fleet
from engine.replicas.routing.policy import Policy
from engine.replicas.routing.sessions import Sessions
from multimodal.text.routed_prompts import RoutedPrompts
from routers.state import RouterService
from server.compose.composition import Composition, Failed, never
from server.compose.model import load_text
from server.metrics.routing import RoutingMetrics
from server.settings import Settings

_MAX_SESSIONS = 1 << 16


async def add_router(to: Composition, folder: Path | None) -> Failed:
    """Find the replicas behind this router, and set the service that forwards requests to them."""
    settings, replica = to.settings, to.replica
    tokenizer, template = await in_thread(partial(load_text, settings, folder))
    observer = RoutingMetrics(to.metrics.registry, replica.model_name)
    fleet = _fleet(settings, observer)
    to.stack.push_async_callback(fleet.close)
    await fleet.start()
    to.metrics.watch(lambda: observer.update(fleet))
    to.health.check("replicas", lambda: fleet.missing)
    replica.peers["replica"] = lambda: fleet.counts
    prompts = RoutedPrompts(replica.model_name, tokenizer, template, settings.chat_template_kwargs)
    replica.service = RouterService(
        fleet=fleet, prompts=prompts, session_header=settings.session_header, internal_secret=to.internal_secret
    )
    return never


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
        Sessions(_MAX_SESSIONS, settings.session_seconds),
    )


def _key(settings: Settings) -> list[Header]:
    """Return the header of probes. Replicas share their API keys; forwarded requests carry the client's."""
    return [(b"authorization", b"Bearer " + key.get_secret_value().encode()) for key in settings.api_keys[:1]]
