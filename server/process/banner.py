"""The summary of a ready server: a banner on a terminal, one line elsewhere."""

import sys
from collections.abc import Iterator
from pathlib import Path

from engine.checkpoints.store import weight_bytes
from engine.kit.logs import size_text
from engine.types import EngineInfo
from routers.state import ReplicaState, RouterService, VisualService
from server import __version__
from server.roles import role_of
from server.settings import Settings

_LABEL = 10


def warning(settings: Settings) -> str:
    """Return a warning if strangers can use the server; empty if they cannot."""
    if settings.api_keys or settings.is_local:
        return ""
    return (
        f"HOST={settings.host} without API_KEYS: whoever reaches this machine can use the server; set API_KEYS, "
        "or HOST=127.0.0.1"
    )


def on_terminal(settings: Settings) -> bool:
    """Return whether the log goes to a terminal, where people read it."""
    return settings.log_format == "text" and sys.stderr.isatty()


def summary(settings: Settings, replica: ReplicaState) -> str:
    """Return a summary of the replica's capacity and processes."""
    return f"{_capacity(replica)}{_processes(settings)}"


def _capacity(replica: ReplicaState) -> str:
    if isinstance(replica.service, RouterService):
        return f"by {len(replica.service.fleet.replicas)} replicas"
    if isinstance(replica.service, VisualService):
        made = replica.service.engine.info
        kinds = " and ".join(f"{kind}s" for kind in made.makes)
        return f"{kinds} by {made.pipeline}, {made.dtype} on {made.device}"
    if replica.engine is None:
        return "images alone"
    info = replica.engine.info
    how = (
        f"context {info.capacity or info.context_length} tokens, KV cache {info.num_blocks * info.block_size} tokens, "
    )
    return f"{how}{info.max_num_seqs} sequences at once{_computing(info)}"


def _processes(settings: Settings) -> str:
    return f", {settings.api_processes} API processes" if settings.api_processes > 1 else ""


def banner(settings: Settings, replica: ReplicaState, url: str, seconds: float) -> str:
    """Return the banner of a ready server."""
    lines = [f"{label:<{_LABEL}}{text}" for label, text in _facts(settings, replica, url)]
    head = f"Trellis {__version__} is ready after {seconds:.1f} s"
    return "\n".join(["", head, *(f"  {line}" for line in lines), "", ""])


def _facts(settings: Settings, replica: ReplicaState, url: str) -> Iterator[tuple[str, str]]:
    info = replica.engine.info if replica.engine is not None else None
    weights = weight_bytes(Path(info.model)) if info is not None else 0
    size = f" ({size_text(weights)} of weights)" if weights else ""
    yield "model", f"{replica.model_name}{size}"
    if info is None:
        yield "serves", _capacity(replica)
    else:
        threads = f", {info.threads} threads" if info.threads else ""
        yield "device", f"{_computing(info).removeprefix(', ') or 'none'}{threads}"
        memory = f"{size_text(info.kv_bytes)}, " if info.kv_bytes else ""
        yield "KV cache", f"{memory}{info.num_blocks * info.block_size:,} tokens"
        tiers = {"host": info.host_kv_bytes, "disk": info.disk_kv_bytes}
        if below := ", ".join(f"{size_text(size)} on the {tier}" for tier, size in tiers.items() if size):
            yield "KV tiers", below
        context = info.capacity or info.context_length
        yield "limits", f"context {context:,} tokens, {info.max_num_seqs} sequences at once{_processes(settings)}"
    yield "API", f"{url}{replica.entrance}"
    if settings.shows_page and role_of(settings).has_text:
        yield "page", f"{url}/"
    if settings.docs:
        yield "docs", f"{url}/docs"
    yield "metrics", f"{url}/metrics"
    keys = len(settings.api_keys)
    needed = f"{keys} API key{'s' if keys > 1 else ''}: requests need one" if keys else ""
    reach = "this machine only" if settings.is_local else "anyone who reaches this machine"
    yield "access", needed or f"{reach}, without an API key"
    yield "stop", f"Ctrl-C; running requests have {settings.shutdown_grace_seconds:g} s to finish"


def _computing(info: EngineInfo) -> str:
    """Return the type, device and code that an engine computes with; nothing for the fake one."""
    how = ", ".join(filter(None, (info.compute_path, info.instruction_set, info.quantization)))
    return "" if info.dtype == "none" else f", {info.dtype} on {info.device}" + (f" ({how})" if how else "")
