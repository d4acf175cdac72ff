"""Turn a configuration of one kind into another: prefill and decode into aggregated and back, and sizes.

A configuration is a values file of the Helm chart: `engine`, `settings`, and `roles` with `enabled`, `replicas`,
`gpus`, `settings` and `engineConfig`, a text with the arguments of TensorRT-LLM's LLM. Unknown keys are kept.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import yaml
from pydantic_settings import SettingsError

from engine.trtllm.arguments import PARALLEL_SIZES

Values = dict[str, Any]
Source = Literal["prefill", "decode"]
_DISAGGREGATED = ("prefill", "decode")
_OF_PREFILL = {"LEASE_SECONDS"}
_OF_DECODE = {
    "PREFILL_FALLBACK",
    "PREFILL_MIN_TOKENS",
    "PREFILL_ATTEMPTS",
    "KV_TRANSFER_PORT",
    "TRANSFER_TIMEOUT_SECONDS",
}
"""Settings that only these roles have a use for."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes texts of several lines as blocks, as people do."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def read_values(text: str, name: str = "the configuration") -> Values:
    """Return the values of a YAML text. Raises SettingsError."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{name} is not YAML: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("roles"), dict):
        raise SettingsError(f"{name} has no roles; it must be a values file of the Helm chart")
    return values


def write_values(values: Mapping[str, Any], original: str = "") -> str:
    """Return values as YAML, with the comment at the head of the text that they were read from; others are lost."""
    lines = original.splitlines(keepends=True)
    head = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return "".join(lines[:head]) + text


def to_aggregated(values: Values, source: Source = "decode") -> Values:
    """Return the configuration with one aggregated role that has what `source` has.

    A prompt's blocks are neither sent nor received: there is no transceiver. A decode role did without block reuse, as
    its blocks came from elsewhere; a prefill role had no use for the overlap scheduler. Raises SettingsError.
    """
    values = copy.deepcopy(values)
    roles = values["roles"]
    if source not in roles:
        raise SettingsError(f"there is no role {source} from which to make an aggregated one")
    role = roles.pop(source)
    for other in _DISAGGREGATED:
        roles.pop(other, None)
        roles[other] = {"enabled": False}
    settings = {name: value for name, value in role.get("settings", {}).items() if name not in _OF_PREFILL | _OF_DECODE}
    arguments = engine_arguments(role)
    if arguments is not None:
        arguments.pop("cache_transceiver_config", None)
        if source == "decode":
            _group(arguments, "kv_cache_config")["enable_block_reuse"] = True
        else:
            arguments["disable_overlap_scheduler"] = False
    before = roles.get("aggregated", {})
    roles["aggregated"] = _role({**before, **role, "enabled": True}, settings, arguments)
    return values


def to_disaggregated(values: Values, prefill: int = 1, decode: int = 1) -> Values:
    """Return the configuration with prefill and decode roles that both have what its aggregated one has.

    With TensorRT-LLM both get a transceiver, and prefill no overlap scheduler, which 1.2.1 refuses there. Raises
    SettingsError.
    """
    values = copy.deepcopy(values)
    roles = values["roles"]
    if not roles.get("aggregated", {}).get("enabled", "aggregated" in roles):
        raise SettingsError("there is no aggregated role from which to make prefill and decode")
    role = roles.pop("aggregated")
    roles["aggregated"] = {"enabled": False}
    for name, replicas in (("prefill", prefill), ("decode", decode)):
        arguments = engine_arguments(role)
        if arguments is None and values.get("engine") == "trtllm":
            arguments = {}
        if arguments is not None:
            _group(arguments, "cache_transceiver_config").setdefault("backend", "DEFAULT")
            if name == "prefill":
                arguments["disable_overlap_scheduler"] = True
        own = {**copy.deepcopy(role), "enabled": True, "replicas": replicas}
        roles[name] = _role({**roles.get(name, {}), **own}, own.get("settings", {}), arguments)
    return values


def resized(values: Values, role: str | None, sizes: Mapping[str, Any]) -> Values:
    """Return the configuration with arguments of TensorRT-LLM set, by dotted name, in `role` or all enabled ones with
    an engine.

    The GPUs of a pod follow the product of the parallel sizes. Raises SettingsError.
    """
    values = copy.deepcopy(values)
    if values.get("engine") != "trtllm":
        raise SettingsError("sizes are arguments of TensorRT-LLM: set `engine: trtllm`, or change `settings`")
    chosen = [name for name in _with_engine(values) if role in (None, name)]
    if not chosen:
        raise SettingsError(f"there is no enabled role {role or 'with an engine'}")
    for name in chosen:
        own = values["roles"][name]
        arguments = engine_arguments(own) or {}
        for path, value in sizes.items():
            *groups, last = path.split(".")
            inner = arguments
            for group in groups:
                inner = _group(inner, group)
            inner[last] = value
        values["roles"][name] = _role(own, own.get("settings", {}), arguments)
        if set(sizes) & set(PARALLEL_SIZES):
            gpus = math.prod(int(arguments.get(size) or 1) for size in PARALLEL_SIZES)
            values["roles"][name]["gpus"] = max(1, gpus // int(own.get("nodes") or 1))
    return values


def engine_arguments(role: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments in a role's `engineConfig`; None if it has none. Raises SettingsError."""
    if not role.get("engineConfig"):
        return None
    try:
        arguments = yaml.safe_load(role["engineConfig"])
    except yaml.YAMLError as error:
        raise SettingsError(f"engineConfig is not YAML: {error}") from error
    if not isinstance(arguments, dict):
        raise SettingsError("engineConfig must be a mapping")
    return arguments


def _with_engine(values: Values) -> list[str]:
    """Return the roles that are enabled and have an engine; the chart enables `aggregated` by itself."""
    roles = cast(dict[str, dict[str, Any] | None], values["roles"])
    return [
        name
        for name in ("aggregated", *_DISAGGREGATED)
        if name in roles and (roles[name] or {}).get("enabled", name == "aggregated")
    ]


def _role(role: Values, settings: Mapping[str, Any], arguments: Mapping[str, Any] | None) -> Values:
    """Return a role with these settings and arguments, and whatever else it has."""
    found = {**role, "settings": dict(settings)} if settings or "settings" in role else dict(role)
    if arguments is not None:
        found["engineConfig"] = yaml.safe_dump(dict(arguments), sort_keys=False)
    return found


def _group(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a nested mapping to write to, in the place of null or nothing."""
    if not isinstance(arguments.get(name), dict):
        arguments[name] = {}
    return cast(dict[str, Any], arguments[name])
