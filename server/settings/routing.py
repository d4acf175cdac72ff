"""Settings of the role router: where the replicas are, and how one is chosen. `server/settings/replica.py` makes them part of all."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from server.settings.types import Names, Urls

_ENDPOINT = re.compile(r"(tcp://(\[[^\s\]]+\]|[^\s:/\[\]*]+):\d{1,5}|ipc://\S+)")


def _endpoints(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_ENDPOINT.fullmatch, value)):
        raise ValueError("each must be tcp://host:port or ipc://path")
    return value


_Endpoints = Annotated[Names, AfterValidator(_endpoints)]


class RoutingSettings(BaseSettings):
    """Replicas, their events, the choice among them, and sessions."""

    # Router
    route_urls: Urls = Field(
        (),
        description="Comma-separated replicas behind a router: http://host:port, or dns+http://name:port for all addresses",
    )
    route_events: _Endpoints = Field(
        (),
        description="Comma-separated ZMQ addresses of the replicas' KV-cache events, in the order of ROUTE_URLS; empty: their hosts, with "
        "ROUTE_EVENTS_PORT",
    )
    route_replays: _Endpoints = Field(
        (), description="Comma-separated ZMQ addresses that send missed events again, for ROUTE_EVENTS; empty has none"
    )
    route_events_port: int = Field(
        5557, ge=0, le=65535, description="Port of the replicas' KV-cache events; 0 listens to none"
    )
    route_replay_port: int = Field(
        5560, ge=0, le=65535, description="Port on which the replicas send missed events again; 0 has none"
    )
    route_policy: Literal["kv", "least_loaded", "round_robin"] = Field(
        "kv",
        description="How a router chooses: kv weighs tokens to compute, cached ones left out, against what a replica has to do already",
    )
    route_overlap_weight: float = Field(
        1.0, ge=0, description="Weight of a request's own tokens to compute against those before it"
    )
    route_temperature: float = Field(
        0.0, ge=0, description="0 takes the cheapest replica; more takes others sometimes, up to all alike"
    )
    route_attempts: int = Field(
        3, ge=1, description="Most replicas that are asked for one request, one after the other"
    )
    session_header: str = Field(
        "x-session-id",
        pattern=r"^[a-z0-9-]*$",
        description="Request header whose value stays with one replica; empty for no such thing",
    )
    session_seconds: float = Field(3600.0, gt=0, description="How long after its last request a session is remembered")

    @field_validator("route_events", mode="after")
    @classmethod
    def _one_each(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        urls = info.data.get("route_urls", ())
        if value and (len(value) != len(urls) or any(url.startswith("dns+") for url in urls)):
            raise ValueError("must have one address for each of ROUTE_URLS, none of which may be a dns+http:// name")
        return value

    @field_validator("route_replays", mode="after")
    @classmethod
    def _one_for_each(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and len(value) != len(info.data.get("route_events", ())):
            raise ValueError("must have one address for each of ROUTE_EVENTS")
        return value
