"""The state that the lifespan hands to the routes (`request.state`), and the dependencies that read it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NotRequired, Protocol, TypedDict, cast

from fastapi import Depends, Request
from starlette.types import Scope

from engine import trace
from engine.admission import AdmissionEngine
from engine.encoder import Encoder
from engine.errors import EngineAsleep, EngineNotReady
from engine.replicas.encode_answers import EncodeService
from engine.replicas.routing.fleet import Fleet
from engine.sleep import Sleeper, SleepState
from engine.visual.base import VisualEngine
from multimodal.media.loader import MediaLoader
from multimodal.processor import Processor
from multimodal.speech.transcriber import Transcriber
from multimodal.text.prompts import MediaPrompts
from multimodal.text.routed_prompts import RoutedPrompts
from protocol.models import Runtime
from routers.batches.store import BatchStore
from routers.errors import Missing
from routers.fields import FieldCheck
from routers.responses.service import Responses
from routers.visual.drawing import VisualLimits
from routers.visual.jobs import VideoJobs
from routers.visual.media import MediaStore

DP_RANK_HEADER = b"x-trellis-dp-rank"
"""Data-parallel rank that a router has chosen for a request; with it comes the internal secret."""
INTERNAL_HEADER = b"x-trellis-internal"


@dataclass(frozen=True, kw_only=True)
class ChatService:
    """Answers the public API, by an engine here."""

    engine: AdmissionEngine
    processor: Processor
    fields: FieldCheck
    images: MediaPrompts | None = None
    """Inserts images into chats, if the model takes any."""
    encoder: Encoder | None = None
    """Encodes these images, here or elsewhere; None if the engine does."""
    transcriber: Transcriber | None = None
    """Transcribes speech, if the model does that; it then does nothing else."""
    batches: BatchStore | None = None
    """Keeps batches of messages, if the settings allow them."""
    responses: Responses = field(default_factory=Responses)
    """Stored responses, and those that run in the background."""

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    async def close(self) -> None:
        """End what runs."""
        await self.responses.close()
        if self.images is not None:
            await self.images.aclose()
        await self.engine.close()
        if self.encoder is not None:
            await self.encoder.close()


@dataclass(kw_only=True)
class PrefillService:
    """Computes prompts for decode replicas, and encodes images for other replicas if the model takes any."""

    engine: AdmissionEngine
    encoding: EncodeService | None = None
    waiting_tokens: int = 0
    """Tokens of prompts whose first token is pending."""

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    async def close(self) -> None:
        """End what runs."""
        await self.engine.close()
        if self.encoding is not None:
            await self.encoding.close()


@dataclass(frozen=True, kw_only=True)
class RouterService:
    """Forwards the public API to replicas that it chooses."""

    fleet: Fleet
    prompts: RoutedPrompts
    session_header: str
    """Empty for no sessions."""
    internal_secret: str = ""
    """Proves to replicas that the data-parallel rank of a request is the router's choice; empty sends none."""

    @property
    def healthy(self) -> bool:
        return self.fleet.healthy

    async def close(self) -> None:
        """End what runs."""
        await self.fleet.close()


@dataclass(frozen=True, kw_only=True)
class VisualService:
    """Makes pictures and videos."""

    engine: VisualEngine
    fields: FieldCheck
    media: MediaStore
    loader: MediaLoader
    """Loads pictures that requests name by URLs."""
    videos: VideoJobs
    limits: VisualLimits
    timeout_seconds: float
    """Seconds that a request may take whose answer has the files."""

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    async def close(self) -> None:
        """End what runs."""
        await self.engine.close()
        await self.loader.aclose()
        await self.media.close()


ReplicaService = ChatService | PrefillService | EncodeService | RouterService | VisualService
"""The service of a replica, by its role."""


@dataclass(eq=False)
class ReplicaState:
    """The replica behind the routes, from the moment the port is open until it closes."""

    model_name: str
    entrance: str = "/v1"
    """The path under which its requests come in."""
    created: int = field(default_factory=lambda: int(time.time()))
    service: ReplicaService | None = None
    """Set once, when every part of the replica has started."""
    loading: str = "The model is loading."
    """Reason why there is no service yet."""
    failure: str | None = None
    """Reason why the server has to end, if it does."""
    checks: dict[str, Callable[[], str]] = field(default_factory=dict)
    """Conditions of readiness other than the service, by name: a call returns the reason why one is not met, empty if
    it is."""
    peers: dict[str, Callable[[], tuple[int, int]]] = field(default_factory=dict)
    """Replicas that this one asks, by their task: a call returns the number of known replicas, and of those that
    answer."""
    sleeper: Sleeper | None = None
    """Puts the engine to sleep, once it serves, if the settings allow it."""
    sleep: SleepState = field(default_factory=SleepState)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the replica drains."""
    registered: bool = False
    """Whether the replica is listed in a registry, which it leaves first when it drains."""
    running: int = 0
    """Requests that a shutdown waits for."""

    @property
    def draining(self) -> bool:
        return self.stopping.is_set()

    @draining.setter
    def draining(self, draining: bool) -> None:
        (self.stopping.set if draining else self.stopping.clear)()

    @property
    def engine(self) -> AdmissionEngine | None:
        """The engine, once it serves; None for encode replicas and routers."""
        return self.service.engine if isinstance(self.service, ChatService | PrefillService) else None

    @property
    def ready(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> list[Missing]:
        """The conditions of readiness that are not met; empty if a request made now would be taken."""
        if self.service is None:
            lacks = [Missing("engine", self.loading)]
        else:
            lacks = [Missing(name, reason) for name, check in self.checks.items() if (reason := check())]
            explained = any(name in ("engine", "prefill_peers", "replicas") for name, _ in lacks)
            if not self.service.healthy and not explained:
                lacks.insert(0, Missing("engine", "The engine is restarting, or closing."))
            if asleep := self.sleep.obstacle:
                lacks.append(Missing("sleep", asleep))
        return [Missing("draining", "The server is shutting down."), *lacks] if self.draining else lacks

    def enter(self) -> ReplicaService:
        """Begin a request, which `leave` ends, and return the service for it. Raises EngineNotReady while starting,
        asleep and draining, and once KV-cache events have failed, so that routers no longer know this cache.
        """
        if self.draining:
            raise EngineNotReady("The server is shutting down.")
        if self.service is None:
            raise EngineNotReady(self.loading)
        if asleep := self.sleep.obstacle:
            raise EngineAsleep(asleep)
        if (publishing := self.checks.get("kv_events")) is not None and (reason := publishing()):
            raise EngineNotReady(reason)
        self.running += 1
        return self.service

    def leave(self) -> None:
        self.running -= 1


@dataclass(frozen=True)
class HttpOptions:
    """Options for reading requests and sending streams."""

    max_body_bytes: int
    body_timeout: float
    """Seconds for the whole body."""
    ping_interval: float
    """Seconds of silence before a keep-alive comment; 0 sends none."""
    lease_seconds: float
    """Seconds for which KV blocks and embeddings are held for another replica."""
    max_images: int
    max_image_bytes: int
    max_video_bytes: int
    max_audio_bytes: int
    max_text_bytes: int
    """Bytes of a body without its images."""
    max_values: int
    """JSON values of a body."""


GONE = 499
"""Status, in metrics and traces, of a request whose client left before the answer (nginx's number)."""


class MessageClock(Protocol):
    """Measures and traces a request that came as a message on a WebSocket, until `end`."""

    span: trace.Span | None
    """Span of the request; None without tracing."""
    status: int
    """The status that the answer would have over HTTP; initially GONE."""

    def end(self) -> None: ...


class State(TypedDict):
    """The lifespan's state. Middleware adds `request_id`, `owner` and, past the gate, `service` to each request's copy;
    `body_bytes` is there once the body has been read.
    """

    version: str
    replica: ReplicaState
    http: HttpOptions
    render_error: Callable[[Exception, Scope], bytes]
    """Return the error envelope of a request's exception (`server/http/errors.py`)."""
    status_of: Callable[[Exception], int]
    """Return the status of the answer to a request's exception."""
    begin_message: Callable[[Scope, str, int], MessageClock]
    """Begin a request on a WebSocket: the connection's scope, the request's id and its bytes."""
    render_metrics: Callable[[], bytes]
    runtime: Callable[[], Runtime]
    """Return how the replica runs, as far as is known now."""
    settings: dict[str, object]
    """Settings without secrets."""
    profile_dir: Path | None
    """Folder for profiles of the engine; None if there are none."""
    body_bytes: NotRequired[int]


def state_of(request: Request) -> State:
    return cast(State, request.scope["state"])


# Dependencies are coroutines, since FastAPI calls a plain function in a thread.


async def _state(request: Request) -> State:
    return state_of(request)


async def _replica(request: Request) -> ReplicaState:
    return state_of(request)["replica"]


async def _service(request: Request) -> ReplicaService:
    """Return the service that the gate has found. A role mounts only routes that its kind of service answers."""
    return cast(ReplicaService, request.scope["state"]["service"])


async def _dp_rank(request: Request) -> int | None:
    return cast("int | None", request.scope["state"].get("dp_rank"))


async def _owner(request: Request) -> str:
    return cast(str, request.scope["state"].get("owner", ""))


async def _request_id(request: Request) -> str:
    return cast(str, request.scope["state"]["request_id"])


StateDep = Annotated[State, Depends(_state)]
ReplicaDep = Annotated[ReplicaState, Depends(_replica)]
ChatServiceDep = Annotated[ChatService, Depends(_service)]
EngineServiceDep = Annotated[ChatService | PrefillService, Depends(_service)]
PrefillServiceDep = Annotated[PrefillService, Depends(_service)]
EncodingDep = Annotated[PrefillService | EncodeService, Depends(_service)]
RouterServiceDep = Annotated[RouterService, Depends(_service)]
ModelServiceDep = Annotated[ChatService | VisualService, Depends(_service)]
VisualServiceDep = Annotated[VisualService, Depends(_service)]
DpRank = Annotated[int | None, Depends(_dp_rank)]
Owner = Annotated[str, Depends(_owner)]
"""A name for the key of the request; empty on a server without keys."""
RequestId = Annotated[str, Depends(_request_id)]
