"""What the lifespan hands to the routes (`request.state`), and the dependencies that read it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypedDict, cast

from fastapi import Depends, Request

from engine.admission import AdmissionEngine
from engine.encoder import Encoder
from engine.errors import EngineNotReady
from engine.replicas.encode_service import EncodeService
from engine.replicas.routing.fleet import Fleet
from multimodal.processor import Processor
from multimodal.text.prompt import MediaPrompts
from multimodal.text.routed_prompts import RoutedPrompts
from protocol.models import Runtime


class Missing(NamedTuple):
    """Something that a replica lacks to be ready."""

    name: str
    """For programs: engine, prefill_peers, replicas, kv_events, canary, event_loop or draining."""
    reason: str
    """For people."""


class NotReady(EngineNotReady):
    """A replica takes no requests for now; it says all that it lacks."""

    def __init__(self, missing: list[Missing]) -> None:
        super().__init__(" ".join(dict.fromkeys(reason for _, reason in missing)))
        self.missing = missing


@dataclass(frozen=True)
class RequestRouter:
    """What a router has in the place of an engine."""

    fleet: Fleet
    prompts: RoutedPrompts
    session_header: str
    """Empty for no sessions."""

    @property
    def healthy(self) -> bool:
        return self.fleet.healthy

    async def close(self) -> None:
        await self.fleet.close()


@dataclass(eq=False)
class Replica:
    """The one model behind the routes, from the moment the port is open until it closes."""

    model_name: str
    entrance: str = "/v1"
    """Where its requests come in."""
    has_engine: bool = True
    """False for an encode replica and for a router."""
    created: int = field(default_factory=lambda: int(time.time()))
    engine: AdmissionEngine | None = None
    """Set once it has started, together with the processor."""
    processor: Processor | None = None
    images: MediaPrompts | None = None
    """What puts images into chats; set, if the model takes any, with the processor."""
    encoder: Encoder | None = None
    """Encodes the images of chats, here or elsewhere; set, if there is one, before the engine is."""
    encoding: EncodeService | None = None
    """What encodes images for other replicas. Set before the engine is, if there is to be one."""
    router: RequestRouter | None = None
    """What chooses replicas, if this is a router."""
    loading: str = "The model is loading."
    """Why it is not there yet."""
    failure: str | None = None
    """Why the server has to end, if it does."""
    checks: dict[str, Callable[[], str]] = field(default_factory=dict)
    """Parts that readiness depends on besides the engine, by their names in `Missing`: a call says why one is not there, empty if it is."""
    peers: dict[str, Callable[[], tuple[int, int]]] = field(default_factory=dict)
    """Replicas that this one asks, by what for: a call says how many it knows, and how many of them answer."""
    draining: bool = False
    running: int = 0
    """Requests that a shutdown waits for."""

    @property
    def core(self) -> AdmissionEngine | EncodeService | RequestRouter | None:
        """What its requests need: the engine, or what an encode replica or a router has instead; None before it has started."""
        return self.engine if self.engine is not None or self.has_engine else self.encoding or self.router

    @property
    def ready(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> list[Missing]:
        """What it lacks to be ready; empty if a request made now would be taken."""
        if self.core is None:
            lacks = [Missing("engine", self.loading)]
        else:
            lacks = [Missing(name, reason) for name, check in self.checks.items() if (reason := check())]
            if not self.core.healthy and not any(name in ("engine", "prefill_peers", "replicas") for name, _ in lacks):
                lacks.insert(0, Missing("engine", "The engine is restarting, or closing."))
        return [Missing("draining", "The server is shutting down."), *lacks] if self.draining else lacks

    def enter(self) -> None:
        """Begin a request, which may use engine and processor; `leave` ends it. Raises EngineNotReady while starting and draining, and when
        routers can no longer know what is here.
        """
        if self.draining:
            raise EngineNotReady("The server is shutting down.")
        if self.core is None:
            raise EngineNotReady(self.loading)
        if (publishing := self.checks.get("kv_events")) is not None and (reason := publishing()):
            raise EngineNotReady(reason)
        self.running += 1

    def leave(self) -> None:
        self.running -= 1


@dataclass(frozen=True)
class HttpOptions:
    """How requests are read and streams are sent."""

    max_body_bytes: int
    body_timeout: float
    """Seconds for the whole body."""
    ping_interval: float
    """Seconds of silence before a keep-alive comment; 0 sends none."""
    lease_seconds: float
    """How long KV blocks and embeddings are held for another replica."""
    max_images: int
    max_image_bytes: int


class State(TypedDict):
    version: str
    replica: Replica
    http: HttpOptions
    render_error: Callable[[Exception], bytes]
    """The error envelope for an exception (`server/http/errors.py`)."""
    render_metrics: Callable[[], bytes]
    runtime: Callable[[], Runtime]
    """How the replica runs, as far as is known now."""
    settings: dict[str, object]
    """Without secrets."""


def state_of(request: Request) -> State:
    return cast(State, request.scope["state"])


# Dependencies are coroutines, since FastAPI calls a plain function in a thread.


async def _state(request: Request) -> State:
    return state_of(request)


async def _replica(request: Request) -> Replica:
    return state_of(request)["replica"]


async def _processor(request: Request) -> Processor:
    processor = state_of(request)["replica"].processor
    assert processor is not None, "the gate lets no request in before the processor is there"
    return processor


async def _request_id(request: Request) -> str:
    return cast(str, request.scope["state"]["request_id"])


StateDep = Annotated[State, Depends(_state)]
ReplicaDep = Annotated[Replica, Depends(_replica)]
ProcessorDep = Annotated[Processor, Depends(_processor)]
RequestId = Annotated[str, Depends(_request_id)]
