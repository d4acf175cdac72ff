"""Settings of logs, KV-cache events, traces, and the checks that a replica makes of itself."""

from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field
from pydantic_settings import BaseSettings

from engine.replicas.publisher.publisher import PublisherConfig
from server.settings.types import ListenAddress, default


def _web(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("must be http://host:port or https://host:port")
    return value


def _nats(value: str) -> str:
    if value and not value.startswith(("nats://", "tls://", "ws://", "wss://")):
        raise ValueError("must be nats://host:port or tls://host:port")
    return value


class LogSettings(BaseSettings):
    """Log lines."""

    # Logs
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged")
    log_format: Literal["text", "json"] = Field("text", description="Format of log lines: text for people, or JSON")
    access_log: bool = Field(False, description="Log every request")


class ObservabilitySettings(BaseSettings):
    """Where KV-cache events and traces go, and how the replica checks itself."""

    # KV-cache events, if publish_kv_events is set
    kv_events_endpoint: ListenAddress = Field(
        "tcp://*:5557",
        min_length=1,
        description="ZMQ address on which KV-cache events are published, with PUBLISH_KV_EVENTS",
    )
    kv_events_replay_endpoint: ListenAddress = Field(
        default(PublisherConfig, "replay_endpoint"),
        description="ZMQ address that sends missed KV-cache events again, tcp://*:5560 for example; empty disables it",
    )
    kv_events_topic: str = Field(
        default(PublisherConfig, "topic"),
        description="Topic of the KV-cache events, for subscribers to several replicas",
    )
    kv_events_buffer: int = Field(
        default(PublisherConfig, "buffer"), ge=1, description="Number of KV-cache event messages kept for sending again"
    )
    nats_url: Annotated[str, AfterValidator(_nats)] = Field(
        "",
        description="NATS server that also receives the KV-cache events, nats://host:4222 for example; empty "
        "disables it",
    )
    nats_subject: str = Field(
        "trellis.kv_events",
        min_length=1,
        pattern=r"^[^\s*>]+$",
        description="NATS subject of the KV-cache events",
    )

    # Traces
    otel_endpoint: Annotated[str, AfterValidator(_web)] = Field(
        "",
        validation_alias=AliasChoices("otel_endpoint", "otel_exporter_otlp_traces_endpoint"),
        description="OTLP (HTTP) collector of traces, http://collector:4318 for example; empty disables tracing",
    )
    otel_service_name: str = Field("trellis", min_length=1, description="Name of this service in traces")
    otel_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Fraction of requests that are traced, unless the client's traceparent decides",
    )

    # Health
    canary_seconds: float = Field(
        0.0,
        ge=0,
        description="Idle seconds after which the replica sends itself a canary request of one token; 0 disables it",
    )
    canary_timeout_seconds: float = Field(
        10.0, gt=0, description="Seconds a canary request may take before the replica reports not ready"
    )
    watchdog_seconds: float = Field(
        5.0,
        gt=0,
        description="Seconds the event loop may be blocked before its stack is logged and the replica reports not "
        "ready",
    )
