"""What the lifespan hands to the routes (`request.state`), and the dependencies that read it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypedDict, cast

from fastapi import Depends, Request

from engine.admission import AdmissionEngine
from engine.errors import EngineNotReady
from multimodal.processor import Processor


@dataclass(eq=False)
class Replica:
    """The one model behind the routes, from the moment the port is open until it closes."""

    model_name: str
    created: int = field(default_factory=lambda: int(time.time()))
    engine: AdmissionEngine | None = None
    """Set once it has started, together with the processor."""
    processor: Processor | None = None
    failure: str | None = None
    """Why the server has to end, if it does."""
    draining: bool = False
    running: int = 0
    """Requests that a shutdown waits for."""

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.engine.healthy and not self.draining

    def enter(self) -> None:
        """Begin a request, which may use engine and processor; `leave` ends it. Raises EngineNotReady while starting and draining."""
        if self.draining:
            raise EngineNotReady("The server is shutting down.")
        if self.engine is None:
            raise EngineNotReady("The model is loading.")
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


class State(TypedDict):
    version: str
    replica: Replica
    http: HttpOptions
    render_error: Callable[[Exception], bytes]
    """The error envelope for an exception (`server/errors.py`)."""
    render_metrics: Callable[[], bytes]


def get_state(request: Request) -> State:
    return cast(State, request.scope["state"])


def get_replica(request: Request) -> Replica:
    return get_state(request)["replica"]


def get_processor(request: Request) -> Processor:
    processor = get_replica(request).processor
    assert processor is not None, "the gate lets no request in before the processor is there"
    return processor


def get_request_id(request: Request) -> str:
    return cast(str, request.scope["state"]["request_id"])


ReplicaDep = Annotated[Replica, Depends(get_replica)]
ProcessorDep = Annotated[Processor, Depends(get_processor)]
StateDep = Annotated[State, Depends(get_state)]
RequestId = Annotated[str, Depends(get_request_id)]
