"""Settings of logs, KV-cache events, traces, and the checks that a replica makes of itself."""

from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from engine.replicas.publisher.publisher import PublisherConfig
from server.settings.types import ListenAddress, PathOrNone, Section, none_if_empty

_PUBLISHER = PublisherConfig(endpoint="")


def _web(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("must be http://host:port or https://host:port")
    return value


def _nats(value: str) -> str:
    if value and not value.startswith(("nats://", "tls://", "ws://", "wss://")):
        raise ValueError("must be nats://host:port or tls://host:port")
    return value


class LogSettings(Section):
    """Log lines."""

    group = "Logs"

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines: text for people, or JSON."""
    access_log: Annotated[bool | None, BeforeValidator(none_if_empty)] = None
    """Log every request; empty does so on a terminal, but leaves out probes of health and metrics that succeed."""


class MetricSettings(Section):
    """Contents of /metrics."""

    group = "Metrics"

    vllm_metrics: bool = False
    """Show metrics under vLLM's names (vllm:num_requests_running and others) as well, for dashboards and autoscalers
    made for vLLM.
    """


class EventSettings(Section):
    """Settings of KV-cache events, if publish_kv_events is set."""

    group = "KV-cache events"

    kv_events_endpoint: ListenAddress = Field("tcp://*:5557", min_length=1)
    """ZMQ address on which KV-cache events are published, with PUBLISH_KV_EVENTS."""
    kv_events_replay_endpoint: ListenAddress = _PUBLISHER.replay_endpoint
    """ZMQ address that sends missed KV-cache events again, tcp://*:5560 for example; empty disables it."""
    kv_events_topic: str = _PUBLISHER.topic
    """Topic of the KV-cache events, for subscribers to several replicas."""
    kv_events_buffer: int = Field(_PUBLISHER.buffer, ge=1)
    """Number of KV-cache event messages kept for sending again."""
    nats_url: Annotated[str, AfterValidator(_nats)] = ""
    """NATS server that also receives the KV-cache events, nats://host:4222 for example; empty disables it."""
    nats_subject: str = Field("trellis.kv_events", min_length=1, pattern=r"^[^\s*>]+$")
    """NATS subject of the KV-cache events."""


class ProfileSettings(Section):
    """Profiles of the embedded engine, which POST /start_profile and /stop_profile record."""

    group = "Profiles"

    profile_dir: PathOrNone = None
    """Folder for profiles (Chrome traces) of the embedded engine; empty records none."""


class TraceSettings(Section):
    """Settings of traces."""

    group = "Traces"

    otel_endpoint: Annotated[str, AfterValidator(_web)] = Field(
        "", validation_alias=AliasChoices("otel_endpoint", "otel_exporter_otlp_traces_endpoint")
    )
    """OTLP (HTTP) collector of traces, http://collector:4318 for example; empty disables tracing."""
    otel_service_name: str = Field("trellis", min_length=1)
    """Name of this service in traces."""
    otel_sample_ratio: float = Field(1.0, ge=0, le=1)
    """Fraction of requests that are traced, unless the client's traceparent decides."""


class HealthSettings(Section):
    """Settings of the replica's checks of itself."""

    group = "Health"

    canary_seconds: float = Field(0.0, ge=0)
    """Idle seconds after which the replica sends itself a canary request of one token; 0 disables it."""
    canary_timeout_seconds: float = Field(10.0, gt=0)
    """Seconds a canary request may take before the replica reports not ready."""
    watchdog_seconds: float = Field(5.0, gt=0)
    """Seconds the event loop may be blocked before its stack is logged and the replica reports not ready."""
