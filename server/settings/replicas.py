"""Settings of disaggregated serving and of the router: where other replicas are, and how they are used."""

from typing import Literal

from pydantic import AliasChoices, Field, ValidationInfo, field_validator

from server.settings.types import EMBEDDED, ConnectAddresses, Names, Section, Urls


class DisaggregationSettings(Section):
    """Prefill replicas, and how KV blocks move between replicas."""

    group = "Disaggregation"

    prefill_urls: Urls = ()
    """Comma-separated prefill replicas of a decode replica: http://host:port, dns+http://name:port for all addresses,
    or file:///path with one URL on each line, which is read again every few seconds.
    """
    prefill_fallback: Literal["local", "refuse"] = "local"
    """Fallback when no prefill replica answers: local computes the prompt on the decode replica, refuse answers 503."""
    prefill_min_tokens: int = Field(32, ge=0)
    """Shorter prompts are computed by the decode replica itself, unless PREFILL_FALLBACK is refuse."""
    prefill_attempts: int = Field(3, ge=1)
    """Maximum number of prefill replicas tried for one request, one after another."""
    lease_seconds: float = Field(30.0, gt=0)
    """Seconds that a prefill replica keeps KV blocks that no replica has read."""
    kv_transfer: Literal["auto", "shared_memory", "cuda_ipc", "nixl", "tcp"] = "auto"
    """Transport of KV blocks between replicas of the embedded engine; auto takes the fastest that both support."""
    kv_transfer_port: int = Field(EMBEDDED.kv_transfer_port, ge=0, le=65535)
    """TCP port on which KV blocks are served; 0 takes a free one."""
    transfer_timeout_seconds: float = Field(EMBEDDED.transfer_timeout_seconds, gt=0)
    """Seconds that reading a prompt's KV blocks may take before the decode replica computes the prompt itself."""


class RoutingSettings(Section):
    """Replicas behind a router, their events, the choice among them, and sessions."""

    group = "Router"

    route_urls: Urls = ()
    """Comma-separated replicas behind a router: http://host:port, dns+http://name:port for all addresses, or
    file:///path with one URL on each line, which is read again every few seconds.
    """
    route_events: ConnectAddresses = ()
    """Comma-separated ZMQ addresses of the replicas' KV-cache events, in the order of ROUTE_URLS; empty takes the
    replicas' hosts with ROUTE_EVENTS_PORT."""
    route_replays: ConnectAddresses = ()
    """Comma-separated ZMQ addresses that send missed events again, in the order of ROUTE_EVENTS; empty uses none."""
    route_events_port: int = Field(5557, ge=0, le=65535)
    """Port of the replicas' KV-cache events; 0 subscribes to none."""
    route_replay_port: int = Field(5560, ge=0, le=65535)
    """Port on which the replicas send missed events again; 0 uses none."""
    route_policy: Literal["kv", "least_loaded", "round_robin"] = "kv"
    """Policy by which the router chooses a replica: kv weighs the uncached tokens of the prompt against the replica's
    load, least_loaded ignores the cache, round_robin takes turns.
    """
    route_overlap_weight: float = Field(1.0, ge=0)
    """Weight of the request's own uncached tokens against the replica's load."""
    route_temperature: float = Field(0.0, ge=0)
    """Randomness of the choice: 0 takes the cheapest replica, higher values spread requests."""
    route_attempts: int = Field(3, ge=1)
    """Maximum number of replicas tried for one request, one after another."""
    session_header: str = Field("x-session-id", pattern=r"^[a-z0-9-]*$")
    """Request header that names a session, whose requests go to one replica; empty disables sessions."""
    session_seconds: float = Field(3600.0, gt=0)
    """Seconds for which a session is remembered after its last request, and which replica made a response."""

    @field_validator("route_events", mode="after")
    @classmethod
    def _one_per_url(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        urls = info.data.get("route_urls", ())
        if value and (len(value) != len(urls) or any(url.startswith(("dns+", "file:")) for url in urls)):
            raise ValueError(
                "must have one address for each of ROUTE_URLS, none of which may be a dns+http:// name or a file"
            )
        return value

    @field_validator("route_replays", mode="after")
    @classmethod
    def _one_per_events(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and len(value) != len(info.data.get("route_events", ())):
            raise ValueError("must have one address for each of ROUTE_EVENTS")
        return value


_NAME = r"^[a-zA-Z0-9_-]+$"


def _dyn(setting: str, variable: str) -> AliasChoices:
    """Have a setting read Dynamo's own environment variable too."""
    return AliasChoices(setting, variable)


class DynamoSettings(Section):
    """A replica as a worker of a Dynamo graph."""

    group = "Dynamo"

    dynamo: bool = False
    """Join a Dynamo graph as a worker, beside HTTP: register the model, serve generate over Dynamo's request plane, and
    publish KV-cache events and load. Needs the extra dynamo.
    """
    dynamo_namespace: str = Field("dynamo", pattern=_NAME, validation_alias=_dyn("dynamo_namespace", "dyn_namespace"))
    """Namespace of the graph; DYN_NAMESPACE is read too, and so are Dynamo's names of the other settings."""
    dynamo_component: str = Field("", pattern=r"^[a-zA-Z0-9_-]*$")
    """Component of the worker; empty is prefill or encode for these roles, and backend for others."""
    dynamo_endpoint: str = Field("generate", pattern=_NAME)
    """Name of the worker's endpoint."""
    dynamo_discovery: Literal["etcd", "kubernetes", "file", "mem"] = Field(
        "etcd", validation_alias=_dyn("dynamo_discovery", "dyn_discovery_backend")
    )
    """Discovery of workers: etcd, kubernetes, file (a folder on this machine, named by DYN_FILE_KV) or mem."""
    dynamo_etcd: Names = Field(("http://localhost:2379",), validation_alias=_dyn("dynamo_etcd", "etcd_endpoints"))
    """Comma-separated addresses of etcd, with DYNAMO_DISCOVERY etcd."""
    dynamo_request_plane: Literal["tcp", "nats"] = Field(
        "tcp", validation_alias=_dyn("dynamo_request_plane", "dyn_request_plane")
    )
    """Transport of requests from Dynamo's frontend; nats needs NATS_SERVER."""
    dynamo_event_plane: Literal["zmq", "nats"] = Field(
        "zmq", validation_alias=_dyn("dynamo_event_plane", "dyn_event_plane")
    )
    """Transport of KV-cache events and load to Dynamo's routers; nats needs NATS_SERVER."""
    dynamo_kv_events: bool = True
    """Publish KV-cache events to Dynamo's routers."""
    dynamo_tool_parser: str = Field("auto", validation_alias=_dyn("dynamo_tool_parser", "dyn_tool_call_parser"))
    """Parser of tool calls for Dynamo's frontend, by Dynamo's names; auto takes the same as our own HTTP if Dynamo has
    it, empty uses none.
    """
    dynamo_reasoning_parser: str = Field(
        "auto", validation_alias=_dyn("dynamo_reasoning_parser", "dyn_reasoning_parser")
    )
    """Parser of reasoning for Dynamo's frontend, by Dynamo's names; auto takes the same as our own HTTP if Dynamo has
    it, empty uses none.
    """
    dynamo_drain_seconds: float = Field(
        5.0, ge=0, validation_alias=_dyn("dynamo_drain_seconds", "dyn_graceful_shutdown_grace_period_secs")
    )
    """Seconds from leaving discovery to refusing requests, for frontends that have not noticed yet."""
