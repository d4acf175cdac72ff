"""The arguments of TensorRT-LLM's `LLM` in layers, each of which overrides those before it: defaults, settings,
EXTRA_ENGINE_ARGS, OVERRIDE_ENGINE_ARGS, forced.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.trtllm import versions
from engine.trtllm.arguments import (
    ENCODER_DEFAULTS,
    ArgumentLayer,
    Effective,
    attention_dp_size,
    defaults,
    derived,
    encoder_problems,
    forced,
    gpus_per_replica,
    guided_backends,
    merge,
    parallel_sizes,
    problems,
    processor_problems,
    taken,
)
from server.roles import role_of
from server.settings import EngineArgsError, Settings

_SAME_NAME = (
    "dtype", "max_seq_len", "max_batch_size", "max_num_tokens", "enable_chunked_prefill", "tensor_parallel_size",
    "pipeline_parallel_size", "enable_attention_dp", "trust_remote_code", "load_format",
)  # fmt: skip
_OPEN = ("max_seq_len", "max_batch_size", "max_num_tokens")
"""Settings whose 0 leaves the choice to the engine."""
_OTHER_NAME = {"expert_parallel_size": "moe_expert_parallel_size", "gpus_per_node": "gpus_per_node"}
_OF_KV_CACHE = {
    "free_gpu_memory_fraction": "free_gpu_memory_fraction",
    "kv_block_size": "tokens_per_block",
    "enable_block_reuse": "enable_block_reuse",
}
_OFFLOAD_PRIORITY = "secondary_offload_min_priority"
_HOST_CACHE = "kv_cache_config.host_cache_size"
"""TensorRT-LLM's argument for the host cache, in bytes; KV_HOST_CACHE_MB is in MiB."""


_DRAFT_TOKENS = 4
"""Drafted tokens with TensorRT-LLM unless SPECULATIVE_TOKENS is set: it always computes this many for every
sequence."""


@dataclass(frozen=True)
class Parallelism:
    """The number of ranks of one replica. `said` names the sizes and the layer that set each, for messages."""

    ranks: int
    per_node: int
    """Number of GPUs in a node; 0 takes the visible ones."""
    said: str


def effective(settings: Settings, folder: Path | None = None) -> Effective:
    """Merge and check all layers, and drop the arguments that the role does not take. Raises EngineArgsError. The
    model's `folder` determines which libraries for structured output fit its tokenizer.
    """
    role = role_of(settings)
    encoder = role.core == "encoder"
    layers = [
        ArgumentLayer("default", ENCODER_DEFAULTS if encoder else defaults(settings.free_gpu_memory_fraction)),
        ArgumentLayer("setting", _from_settings(settings)),
        ArgumentLayer("EXTRA_ENGINE_ARGS", _from_file(settings)),
        ArgumentLayer("OVERRIDE_ENGINE_ARGS", _from_json(settings)),
    ]
    if not encoder:
        possible = derived(merge(layers).arguments, **({} if folder is None else {"backends": guided_backends(folder)}))
        layers.insert(1, ArgumentLayer("default", possible))
    processors = settings.trtllm_sampling == "processors"
    layers += forced(
        merge(layers).arguments,
        processors=not encoder and (processors or settings.enable_test_logits_processor),
        role_arguments=role.trtllm_arguments,
        moves_kv_blocks=role.moves_kv_blocks,
        publish_kv_events=(settings.publish_kv_events or (settings.dynamo and settings.dynamo_kv_events))
        and not encoder,
    )
    found = merge(layers)
    backend = _backend(found, settings)
    faults = problems(found.arguments, backend, versions.found())
    if encoder and not faults:
        faults = encoder_problems(found.arguments)
    if processors or settings.enable_test_logits_processor:
        setting = "TRTLLM_SAMPLING=processors" if processors else "ENABLE_TEST_LOGITS_PROCESSOR"
        faults += [f"{fault} ({setting})" for fault in processor_problems(found.arguments)]
    if settings.thinking_token_budget >= 0 and not (processors or encoder):
        faults += ["THINKING_TOKEN_BUDGET needs TRTLLM_SAMPLING=processors"]
    if faults:
        raise EngineArgsError([f"{_origin(found, fault)}: {fault}" for fault in faults])
    return taken(found, backend, encoder=encoder)


def parallelism(settings: Settings) -> Parallelism:
    """Return the ranks that the effective arguments need, each number with the layer that set it. Raises
    EngineArgsError.
    """
    found = effective(settings)
    backend = _backend(found, settings)
    sizes = parallel_sizes(found.arguments, backend) or {"tensor_parallel_size": 1}
    said = " x ".join(f"{name} {size} ({found.origins.get(name, 'default')})" for name, size in sizes.items())
    if (copies := attention_dp_size(found.arguments)) > 1 and backend == "pytorch":
        said += f" with {copies} KV caches"
    return Parallelism(gpus_per_replica(found.arguments, backend), found.arguments.get("gpus_per_node") or 0, said)


def from_files(found: Effective) -> dict[str, tuple[Any, str]]:
    """Return the settings that EXTRA_ENGINE_ARGS or OVERRIDE_ENGINE_ARGS override: the value and the layer."""
    paths = {name: name for name in _SAME_NAME} | _OTHER_NAME
    paths |= {ours: f"kv_cache_config.{theirs}" for ours, theirs in _OF_KV_CACHE.items()}
    paths |= {"kv_host_cache_mb": _HOST_CACHE, "secondary_offload_min_priority": f"kv_cache_config.{_OFFLOAD_PRIORITY}"}
    files = ("EXTRA_ENGINE_ARGS", "OVERRIDE_ENGINE_ARGS")

    def value(path: str) -> Any:
        """Return an argument in the setting's unit."""
        found_value = found.value(path)
        return found_value >> 20 if path == _HOST_CACHE and found_value else found_value

    return {
        name: (value(path), f"engine file ({layer})" if layer == files[0] else layer)
        for name, path in paths.items()
        if (layer := found.origins.get(path)) in files
    }


def _backend(found: Effective, settings: Settings) -> str:
    return str(found.arguments.get("backend", settings.backend))


def _from_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that were set, by TensorRT-LLM's names. Defaults of settings are those of other backends."""
    said = settings.model_fields_set
    values: dict[str, Any] = {name: getattr(settings, name) for name in _SAME_NAME if name in said}
    values |= {theirs: getattr(settings, ours) for ours, theirs in _OTHER_NAME.items() if getattr(settings, ours)}
    values = {name: value for name, value in values.items() if value or name not in _OPEN}
    if not settings.enable_cuda_graphs:
        values["cuda_graph_config"] = None
    if "guided_decoding_backend" in said and settings.guided_decoding_backend != "auto":
        chosen = settings.guided_decoding_backend
        values["guided_decoding_backend"] = None if chosen == "none" else chosen
    if settings.speculative != "none":
        values["speculative_config"] = _speculation(settings)
    cache = {theirs: getattr(settings, ours) for ours, theirs in _OF_KV_CACHE.items() if ours in said}
    if settings.kv_host_cache_mb:
        cache["host_cache_size"] = settings.kv_host_cache_mb << 20
    if settings.secondary_offload_min_priority >= 0:
        cache[_OFFLOAD_PRIORITY] = settings.secondary_offload_min_priority
    return values | ({"kv_cache_config": cache} if cache else {})


def _speculation(settings: Settings) -> dict[str, Any]:
    """Return TensorRT-LLM's arguments for the settings of speculation. Raises EngineArgsError for settings without one:
    it computes every draft, of a fixed length."""
    said = settings.model_fields_set
    if lost := sorted({"speculative_answer_tokens", "speculative_min_speedup"} & said):
        raise EngineArgsError([f"{name.upper()}: TensorRT-LLM's speculation has no such setting" for name in lost])
    length = settings.speculative_tokens if "speculative_tokens" in said else _DRAFT_TOKENS
    if settings.speculative == "ngram":
        size = settings.speculative_min_match
        return {"decoding_type": "NGram", "max_draft_len": length, "max_matching_ngram_size": size}
    return {
        "decoding_type": versions.version_of(versions.found() or "").draft_target,
        "max_draft_len": length,
        "speculative_model": settings.speculative_model,
    }


def _from_file(settings: Settings) -> Mapping[str, Any]:
    path = settings.extra_engine_args
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EngineArgsError([f"EXTRA_ENGINE_ARGS: {path}: {' '.join(str(error).split())}"]) from error
    return _mapping(content if content is not None else {}, "EXTRA_ENGINE_ARGS")


def _from_json(settings: Settings) -> Mapping[str, Any]:
    try:
        content = json.loads(settings.override_engine_args or "{}")
    except ValueError as error:
        raise EngineArgsError([f"OVERRIDE_ENGINE_ARGS: not valid JSON: {error}"]) from error
    return _mapping(content, "OVERRIDE_ENGINE_ARGS")


def _mapping(content: Any, setting: str) -> Mapping[str, Any]:
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise EngineArgsError([f"{setting}: must be a mapping from names of arguments"])
    if taken := {"model", "backend"} & content.keys():
        raise EngineArgsError([f"{setting}: {name} is a setting of its own, {name.upper()}" for name in sorted(taken)])
    return content


def _origin(found: Effective, fault: str) -> str:
    """Return the layer that set the argument named first in a fault, or the first argument nested in it."""
    path = fault.partition(":")[0]
    return next(
        (layer for key, layer in found.origins.items() if key == path or key.startswith(f"{path}.")),
        "the engine's arguments",
    )
