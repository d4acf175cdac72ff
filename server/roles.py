"""The roles of a replica, one record each. What differs between roles is a field here; nothing else asks for the role
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from engine.checkpoints.pipelines import is_pipeline
from server.settings import Settings
from server.settings.engine import RoleName

if TYPE_CHECKING:
    from fastapi import APIRouter

Core = Literal["engine", "encoder", "router", "visual"]
"""The core of a replica: an engine of text, encoders alone, a router to other replicas, or an engine of pictures."""


@dataclass(frozen=True)
class Need:
    """A setting that a role cannot do without. `why` completes the error message."""

    setting: str
    met: Callable[[Settings], bool]
    why: str


@dataclass(frozen=True, kw_only=True)
class Role:
    """One role: its routes, its parts and the settings it needs. The defaults are those of `aggregated`."""

    name: RoleName
    routers: Callable[[], tuple[APIRouter, ...]]
    """Returns the routers that it mounts in addition to the operations. It is a function because importing them takes a
    second."""
    entrance: str = "/v1"
    """Path of its requests: public under /v1, internal elsewhere."""
    core: Core = "engine"
    """Chooses the composer (`server/lifespan.py`)."""
    has_text: bool = True
    """Whether requests are text, so that it loads a tokenizer and a chat template."""
    prefill_only: bool = False
    """Whether requests end with the first token, and their KV blocks are held for another replica."""
    remote_prefill: bool = False
    """Whether prompts are computed by other replicas."""
    serves_encodings: bool = False
    """Whether it encodes media for other replicas."""
    needs: tuple[Need, ...] = ()
    trtllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of TensorRT-LLM's LLM that the role forces."""

    @property
    def has_engine(self) -> bool:
        """Whether tokens are computed here."""
        return self.core == "engine"

    @property
    def is_public(self) -> bool:
        """Whether clients send it requests."""
        return self.entrance == "/v1"

    @property
    def has_model(self) -> bool:
        """Whether weights are loaded here; a router takes only the tokenizer of its model."""
        return self.core != "router"

    @property
    def moves_kv_blocks(self) -> bool:
        """Whether KV blocks are sent to other replicas or read from them."""
        return self.prefill_only or self.remote_prefill


def role_of(settings: Settings) -> Role:
    """Return the record of the role that DISAGGREGATION_MODE names; models of pictures have one of their own."""
    if settings.disaggregation_mode == "aggregated" and makes_pictures(settings):
        return VISUAL
    return ROLES[settings.disaggregation_mode]


def makes_pictures(settings: Settings) -> bool:
    """Return whether the model makes pictures or videos."""
    if settings.modality != "auto" or settings.engine == "fake":
        return settings.modality == "visual"
    return _is_pipeline(settings.model)


@cache
def _is_pipeline(model: str) -> bool:
    return is_pipeline(model)


def missing_setting(settings: Settings) -> tuple[str, str] | None:
    """Return the first missing setting that the role needs, and why; None if none is missing."""
    for need in (*role_of(settings).needs, _ENCODE_SECRET, _EMBEDDED_READS, *_DYNAMO_NEEDS, _VISUAL_ROLE):
        if not need.met(settings):
            return f"--{need.setting.replace('_', '-')} ({need.setting.upper()})", need.why
    return None


def _given(role: RoleName, setting: str, why: str) -> Need:
    return Need(setting, lambda settings: bool(getattr(settings, setting)), f"the role {role} needs it: {why}")


def _given_over_http(role: RoleName, setting: str, why: str) -> Need:
    """Return the need of a setting by which replicas find each other over HTTP; a Dynamo graph does not need it."""
    return Need(
        setting,
        lambda settings: settings.dynamo or bool(getattr(settings, setting)),
        f"the role {role} needs it: {why}",
    )


def _one_api_process(role: RoleName, why: str) -> Need:
    return Need("api_processes", lambda settings: settings.api_processes <= 1, f"the role {role} has one: {why}")


_DYNAMO_NEEDS = (
    Need(
        "api_processes",
        lambda settings: settings.api_processes <= 1 or not settings.dynamo,
        "a worker of a Dynamo graph has one: the graph's frontends do the work of the others",
    ),
    Need(
        "disaggregation_mode",
        lambda settings: not settings.dynamo or settings.disaggregation_mode != "router",
        "a worker of a Dynamo graph cannot be a router: the graph has its own",
    ),
    Need(
        "prefill_urls",
        lambda settings: not (settings.dynamo and settings.prefill_urls),
        "leave it out with --dynamo: Dynamo's router chooses the prefill worker",
    ),
)
_VISUAL_ROLE = Need(
    "disaggregation_mode",
    lambda settings: (
        settings.disaggregation_mode in ("aggregated", "router")
        or settings.modality == "text"
        or not makes_pictures(settings)
    ),
    "a model of pictures or videos is aggregated",
)
_WHY_SECRET = "replicas authenticate each other with it"
_ENCODE_SECRET = Need(
    "internal_secret",
    lambda settings: settings.internal_secret is not None or not settings.encode_urls,
    f"ENCODE_URLS needs it: {_WHY_SECRET}",
)
_EMBEDDED_READS = Need(
    "embedding_transfer",
    lambda settings: settings.embedding_transfer != "direct" or settings.engine == "embedded",
    "only the embedded engine reads embeddings where an encode replica made them: leave it out",
)


def _public() -> tuple[APIRouter, ...]:
    from routers import messages, models, tokenize, transcriptions  # noqa: PLC0415
    from routers.batches import routes as batches  # noqa: PLC0415
    from routers.endpoints import ENDPOINTS  # noqa: PLC0415
    from routers.internal import engine  # noqa: PLC0415
    from routers.responses import websocket  # noqa: PLC0415

    return (
        *(endpoint.router() for endpoint in ENDPOINTS),
        websocket.router,
        messages.router,
        batches.router,
        models.router,
        tokenize.router,
        transcriptions.router,
        engine.router,
    )


def _visual() -> tuple[APIRouter, ...]:
    from routers import models  # noqa: PLC0415
    from routers.visual import images, videos  # noqa: PLC0415

    return images.router, videos.router, models.router


def _prefill() -> tuple[APIRouter, ...]:
    from routers.internal import encode, engine, prefill  # noqa: PLC0415

    return prefill.router, engine.router, encode.router, prefill.no_public_routes("a prefill replica")


def _encode() -> tuple[APIRouter, ...]:
    from routers.internal import encode, prefill  # noqa: PLC0415

    return encode.router, prefill.no_public_routes("an encode replica")


def _forwarding() -> tuple[APIRouter, ...]:
    from routers.proxy import http, websocket  # noqa: PLC0415

    return http.router, websocket.router


ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role(name="aggregated", routers=_public),
        Role(
            name="prefill",
            routers=_prefill,
            entrance="/prefill",
            has_text=False,
            prefill_only=True,
            serves_encodings=True,
            needs=(_given_over_http("prefill", "internal_secret", _WHY_SECRET),),
            trtllm_arguments={"disable_overlap_scheduler": True},
        ),
        Role(
            name="decode",
            routers=_public,
            remote_prefill=True,
            needs=(
                _given_over_http("decode", "internal_secret", _WHY_SECRET),
                _given_over_http("decode", "prefill_urls", "it lists the prefill replicas"),
            ),
        ),
        Role(
            name="encode",
            routers=_encode,
            entrance="/encode",
            core="encoder",
            has_text=False,
            serves_encodings=True,
            needs=(
                _given_over_http("encode", "internal_secret", _WHY_SECRET),
                _one_api_process("encode", "each would load the model's vision tower"),
            ),
        ),
        Role(
            name="router",
            routers=_forwarding,
            core="router",
            needs=(
                _given("router", "route_urls", "it lists the replicas to choose from"),
                _one_api_process("router", "it tracks the load of all replicas"),
            ),
        ),
    )
}
assert ROLES.keys() == set(get_args(RoleName))
_WHY_PICTURES = "a model of pictures or videos does without"
VISUAL = Role(
    name="aggregated",
    routers=_visual,
    core="visual",
    has_text=False,
    needs=(
        _one_api_process("aggregated", "requests for pictures are few"),
        Need("engine_address", lambda settings: not settings.engine_address, _WHY_PICTURES),
        Need("engine_standby", lambda settings: settings.engine_standby in (False, "auto"), _WHY_PICTURES),
        Need("dynamo", lambda settings: not settings.dynamo, _WHY_PICTURES),
    ),
)
"""The aggregated role of a model that makes pictures or videos."""
