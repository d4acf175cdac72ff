"""Facts of the running replica, for routers and people: /v1/models and /server_info."""

from functools import cache
from importlib import metadata
from platform import python_version
from urllib.parse import urlsplit

from pydantic import SecretStr

from engine.types import EngineInfo
from protocol.models import Peers, Runtime
from routers.state import ChatService, ReplicaState, VisualService
from server import __version__
from server.roles import role_of
from server.settings import Settings

_PACKAGES = (
    *("torch", "transformers", "diffusers", "tensorrt_llm", "xgrammar", "flashinfer-python", "nixl-cu13"),
    "ai-dynamo-runtime",
)
_HIDDEN = ("_args", "_address", "_urls", "_url", "_etcd", "_secret", "_keys")
"""Suffixes of settings whose values are not shown: they may hold secrets or addresses of other machines."""


def runtime_of(settings: Settings, replica: ReplicaState) -> Runtime:
    """Return the facts that are known now. Facts of the engine are None before it has started, and in replicas without
    an engine."""
    role = role_of(settings)
    publishes = settings.publish_kv_events and role.has_engine
    peers = ((name, count()) for name, count in replica.peers.items())
    runtime = Runtime(
        role=role.name,
        backend=settings.engine if role.has_model else None,
        peers={name: Peers(known=known, available=available) for name, (known, available) in peers},
        kv_events_port=_port(settings.kv_events_endpoint) if publishes else None,
        kv_events_replay_port=_port(settings.kv_events_replay_endpoint) if publishes else None,
        versions=versions(),
    )
    if isinstance(replica.service, ChatService):
        service = replica.service
        tools, reasoning = service.processor.format.parser_names
        media = service.images.kinds if service.images is not None else ()
        takes = ["audio"] if service.transcriber is not None else ["text", *media]
        chat = {"tool_call_parser": tools or None, "reasoning_parser": reasoning or None, "takes": takes}
        runtime = runtime.model_copy(update=chat)
    if isinstance(replica.service, VisualService) and replica.service.healthy:
        info = replica.service.engine.info
        takes = ["text", "image"] if info.edits or info.animates else ["text"]
        pictures = {"device": info.device, "dtype": info.dtype, "pipeline": info.pipeline, "makes": list(info.makes)}
        return runtime.model_copy(update=pictures | {"takes": takes})
    engine = replica.engine
    return runtime if engine is None else runtime.model_copy(update=_facts(engine.info))


def shown_settings(settings: Settings) -> dict[str, object]:
    """Return every setting as JSON; of hidden ones, whether they are set."""
    return {name: _shown(name, getattr(settings, name)) for name in Settings.model_fields}


@cache
def versions() -> dict[str, str]:
    """Return the versions of the server and of relevant packages, as far as they are installed."""
    found = {"trellis": __version__, "python": python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _facts(info: EngineInfo) -> dict[str, object]:
    return {
        "device": info.device,
        "dtype": info.dtype,
        "compute_path": info.compute_path or None,
        "instruction_set": info.instruction_set or None,
        "quantization": info.quantization or None,
        "context_length": info.context_length,
        "kv_block_size": info.block_size,
        "total_kv_blocks": info.num_blocks,
        "kv_host_cache_bytes": info.host_kv_bytes,
        "kv_disk_cache_bytes": info.disk_kv_bytes,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_tokens,
        "tensor_parallel_size": info.tensor_parallel_size,
        "data_parallel_size": info.data_parallel_size,
        "guides": list(info.guides),
        "refused_parameters": dict(info.refused_parameters),
    }


def _port(endpoint: str) -> int | None:
    """Return the port of the first data-parallel rank; those of other ranks follow it."""
    return urlsplit(endpoint.replace("*", "0.0.0.0")).port if endpoint.startswith("tcp://") else None


def _shown(name: str, value: object) -> object:
    if isinstance(value, SecretStr) or name.endswith(_HIDDEN):
        return "***" if value else ""
    if isinstance(value, tuple):
        return [_shown(name, part) for part in value]
    if isinstance(value, str) and "://" in value:
        return _without_user(value)
    return value if isinstance(value, bool | int | float | None) else str(value)


def _without_user(url: str) -> str:
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
