"""Settings of what a replica tells others about itself: events, traces and its own health. `server/settings/replica.py` makes them part of all."""

import re
from typing import Annotated

from pydantic import AfterValidator, AliasChoices, Field
from pydantic_settings import BaseSettings

_SOCKET = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.%a-z]+\]|[^\s:/\[\]*]+):(\d{1,5})|ipc://\S+")


def _socket(value: str) -> str:
    found = _SOCKET.fullmatch(value)
    if value and (found is None or int(found[2] or 0) > 65535):
        raise ValueError("must be tcp://*:port, tcp://address:port or ipc://path")
    return value


def _web(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("must be http://host:port or https://host:port")
    return value


def _nats(value: str) -> str:
    if value and not value.startswith(("nats://", "tls://", "ws://", "wss://")):
        raise ValueError("must be nats://host:port or tls://host:port")
    return value


_SocketAddress = Annotated[str, AfterValidator(_socket)]


class ObservabilitySettings(BaseSettings):
    """Where KV-cache events and traces go, and how the replica checks itself."""

    # KV-cache events, if publish_kv_events is set
    kv_events_endpoint: _SocketAddress = Field(
        "tcp://*:5557",
        min_length=1,
        description="ZMQ address on which KV-cache events are published, with PUBLISH_KV_EVENTS",
    )
    kv_events_replay_endpoint: _SocketAddress = Field(
        "",
        description="ZMQ address that sends missed KV-cache events again, tcp://*:5560 for example; empty offers none",
    )
    kv_events_topic: str = Field("", description="Topic of the KV-cache events, for subscribers of several replicas")
    kv_events_buffer: int = Field(
        10_000, ge=1, description="Messages of KV-cache events that are kept to be sent again"
    )
    nats_url: Annotated[str, AfterValidator(_nats)] = Field(
        "", description="NATS server that KV-cache events go to as well, nats://host:4222 for example; empty uses none"
    )
    nats_subject: str = Field(
        "trellis.kv_events", min_length=1, pattern=r"^[^\s*>]+$", description="NATS subject of the KV-cache events"
    )

    # Traces
    otel_endpoint: Annotated[str, AfterValidator(_web)] = Field(
        "",
        validation_alias=AliasChoices("otel_endpoint", "otel_exporter_otlp_traces_endpoint"),
        description="OTLP (HTTP) collector of traces, http://collector:4318 for example; empty traces nothing",
    )
    otel_service_name: str = Field("trellis", min_length=1, description="Name of this service in traces")
    otel_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Part of the requests that are traced, of those whose client has not decided it with a traceparent",
    )

    # Health
    canary_seconds: float = Field(
        0.0,
        ge=0,
        description="Idle seconds after which the replica tries itself with a request of one token; 0 never does",
    )
    canary_timeout_seconds: float = Field(
        10.0, gt=0, description="How long that may take before the replica is not ready"
    )
    watchdog_seconds: float = Field(
        5.0,
        gt=0,
        description="How long the event loop may stand still before its stack is logged and the replica is not ready",
    )
