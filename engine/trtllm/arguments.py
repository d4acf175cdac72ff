"""The arguments of TensorRT-LLM's `LLM`: merged from layers, checked against 1.2.1, and reduced to what AutoDeploy or
an encoder takes.

Neither a GPU nor the package is needed, so that a wrong key is named at the start and not after minutes of loading.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from engine.trtllm.llm_args import MODELS
from engine.trtllm.support import one_model

Backend = Literal["pytorch", "_autodeploy"]

EVENT_BUFFER_SIZE = 100_000
"""Number of KV-cache events that the engine keeps for the publisher, unless set otherwise."""
KV_TRANSFER_TIMEOUT_MS = 60_000
"""Default time for which blocks are kept for a decode replica: longer than any transfer takes, and as long as a request
waits for the engine by default (QUEUE_TIMEOUT_SECONDS). Without a limit, prompts whose decode replica was lost would
keep their blocks.
"""
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
AUTODEPLOY_REFUSES = (
    "build_config", "scheduler_config", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
    "moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size", "enable_attention_dp",
    "cp_config",
)  # fmt: skip
ENCODER_TAKES = ("max_batch_size", "max_num_tokens", "trust_remote_code", "tensor_parallel_size", "dtype")
"""Arguments of `MultimodalEncoder` that can be set: those that it names, and two of those that it passes on."""
DONE_HERE = ("num_postprocess_workers", "postprocess_tokenizer_dir")
"""Arguments for workers that detokenize, which the server does itself, and through which token ids would not come back.
"""
GUIDED_BACKENDS = ("xgrammar", "llguidance")
UNGUIDED_SPECULATION = ("Medusa", "Lookahead")
"""Kinds of speculation for which `support_guided_decoder` and `support_capturable_guided_decoder` are false."""
ENCODER_DTYPES = ("auto", "float16", "float32", "bfloat16")


@dataclass(frozen=True)
class ArgumentLayer:
    """Arguments from one place; a later layer overrides an earlier one, key by nested key."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Effective:
    """The result of all layers. `origins` names for each dotted key the layer that set it last; `ignored` maps
    arguments that have no effect to the reason.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)

    def value(self, path: str) -> Any:
        """Return the argument of a dotted key of `origins`."""
        value: Any = self.arguments
        for part in path.split("."):
            value = value[part]
        return value


ENCODER_DEFAULTS = {"max_batch_size": 1}
"""Arguments of an encoder unless overridden: it takes one request at a time."""


def defaults(free_gpu_memory_fraction: float) -> dict[str, Any]:
    """Return what we set for an engine unless overridden. No running request is evicted.

    Batch sizes are not tuned at run time: `scheduler_config.dynamic_batch_config` has no effect on the PyTorch backend.
    """
    return {
        "kv_cache_config": {"free_gpu_memory_fraction": free_gpu_memory_fraction},
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
    }


def derived(arguments: Mapping[str, Any], backends: Sequence[str] = GUIDED_BACKENDS) -> dict[str, Any]:
    """Return what we set, unless it is set, because of other arguments and of the guided backends that the model's
    tokenizer can have.

    One-model speculation is greedy without `allow_advanced_sampling`. Guides need a tokenizer, and a kind of
    speculation that can follow them: the engine does not start otherwise.
    """
    found: dict[str, Any] = {}
    speculative = arguments.get("speculative_config")
    if isinstance(speculative, Mapping) and one_model(arguments) and "allow_advanced_sampling" not in speculative:
        found["speculative_config"] = {"allow_advanced_sampling": True}
    if "guided_decoding_backend" not in arguments and backends and not _guides_fail(arguments):
        found["guided_decoding_backend"] = backends[0]
    return found


def guided_backends(folder: Path) -> tuple[str, ...]:
    """Return the guided backends that a model's tokenizer can have, the best first.

    Both take fast tokenizers of transformers, and xgrammar those of tiktoken (`_xgrammar_tokenizer_info`,
    `_llguidance_tokenizer_info`). Of a class in the model's own code only `auto_map` says whether it is fast.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return GUIDED_BACKENDS
    classes = (config.get("auto_map") or {}).get("AutoTokenizer") if isinstance(config, dict) else None
    if classes is None or (isinstance(classes, list) and classes[1:] and classes[1]):
        return GUIDED_BACKENDS
    return GUIDED_BACKENDS[:1] if any(folder.glob("*tiktoken*")) else ()


def forced(
    arguments: Mapping[str, Any],
    *,
    role_arguments: Mapping[str, Any] | None = None,
    moves_kv_blocks: bool = False,
    publish_kv_events: bool = False,
    processors: bool = False,
) -> Iterator[ArgumentLayer]:
    """Yield what the role, the publisher and logits processors need, whatever is set. `arguments` are those of all
    layers before.

    Under the overlap scheduler processors see a sequence that lacks its last token.
    """
    if processors:
        yield ArgumentLayer("processors", {"disable_overlap_scheduler": True})
    if publish_kv_events:
        needed: dict[str, Any] = {"backend": "pytorch", "enable_iter_perf_stats": True}
        if not _get(arguments, "kv_cache_config", "event_buffer_max_size"):
            needed["kv_cache_config"] = {"event_buffer_max_size": EVENT_BUFFER_SIZE}
        yield ArgumentLayer("publishing", needed)
    said = arguments.get("cache_transceiver_config") or {}
    if moves_kv_blocks and isinstance(said, Mapping):
        if not said.get("backend"):
            yield ArgumentLayer("role", {"cache_transceiver_config": {"backend": "DEFAULT"}})
        if "kv_transfer_timeout_ms" not in said:  # null is said, too: no limit
            yield ArgumentLayer(
                "role", {"cache_transceiver_config": {"kv_transfer_timeout_ms": KV_TRANSFER_TIMEOUT_MS}}
            )
    if role_arguments:
        yield ArgumentLayer("role", role_arguments)


def merge(layers: Sequence[ArgumentLayer]) -> Effective:
    """Merge all layers in order, nested keys too. The layers are not changed."""
    effective = Effective()
    for layer in layers:
        _update(effective.arguments, layer.values, layer.name, effective.origins, "")
    return effective


def problems(arguments: Mapping[str, Any], backend: str = "pytorch", version: str | None = None) -> list[str]:
    """Return one line for each argument that 1.2.1 would refuse, with its dotted name; empty if there is none.

    `version` is that of the installed package, if there is one. Another one than 1.2 has arguments of its own, and
    checks them when the engine starts, before it loads anything.
    """
    if version is not None and not version.startswith("1.2."):
        return []
    model = MODELS["AutoDeployLlmArgs" if backend == "_autodeploy" else "TorchLlmArgs"]
    try:
        model.model_validate({"model": "model", **copy.deepcopy(dict(arguments))})
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, entry['loc']))}: {_message(entry)}"
            for entry in error.errors(include_url=False, include_input=False)
        ]
    return list(_contradictions(arguments))


def taken(effective: Effective, backend: str = "pytorch", *, encoder: bool = False) -> Effective:
    """Return the arguments that `LLM`, or `MultimodalEncoder` for an `encoder`, is given; the others are ignored."""
    names = effective.arguments.keys()
    if encoder:
        ignored = dict.fromkeys(sorted(names - set(ENCODER_TAKES)), "an encoder does not take it")
    else:
        refused = sorted(names & set(AUTODEPLOY_REFUSES)) if backend == "_autodeploy" else []
        ignored = dict.fromkeys(refused, "AutoDeploy does not take it")
        ignored |= dict.fromkeys(sorted(names & set(DONE_HERE)), "this server makes text of tokens itself")
    return Effective(
        {name: value for name, value in effective.arguments.items() if name not in ignored},
        {path: layer for path, layer in effective.origins.items() if path.partition(".")[0] not in ignored},
        ignored,
    )


def encoder_problems(arguments: Mapping[str, Any]) -> list[str]:
    """Return what `MultimodalEncoder` refuses in arguments without other `problems`."""
    dtype = arguments.get("dtype", "auto")
    return [] if dtype in ENCODER_DTYPES else [f"dtype: an encoder takes {', '.join(ENCODER_DTYPES)}"]


def parallel_sizes(arguments: Mapping[str, Any], backend: str = "pytorch") -> dict[str, int]:
    """Return the arguments that set the number of ranks, without those that are 1; AutoDeploy has its own."""
    names = ("world_size",) if backend == "_autodeploy" else PARALLEL_SIZES
    return {name: size for name in names if (size := int(arguments.get(name) or 1)) > 1}


def gpus_per_replica(arguments: Mapping[str, Any], backend: str = "pytorch") -> int:
    """Return the engine's ranks: tensor times pipeline times context parallel size."""
    return math.prod(parallel_sizes(arguments, backend).values())


def attention_dp_size(arguments: Mapping[str, Any]) -> int:
    """Return the number of ranks that each have a KV cache of their own."""
    return int(arguments.get("tensor_parallel_size") or 1) if arguments.get("enable_attention_dp") else 1


def processor_problems(arguments: Mapping[str, Any]) -> list[str]:
    """Return what keeps logits processors from being called for each token, in arguments without other `problems`."""
    found = []
    if arguments.get("speculative_config"):
        found.append("speculative_config: TensorRT-LLM calls no logits processors with speculation")
    if _get(arguments, "scheduler_config", "capacity_scheduler_policy") == "MAX_UTILIZATION":
        found.append(
            "scheduler_config.capacity_scheduler_policy: after an eviction, which MAX_UTILIZATION allows, a token is"
            " sampled without logits processors"
        )
    return found


def _guides_fail(arguments: Mapping[str, Any]) -> str:
    """Return why the engine cannot follow guides, or ""."""
    kind = (arguments.get("speculative_config") or {}).get("decoding_type")
    if kind in UNGUIDED_SPECULATION:
        return f"guided decoding is not supported with {kind}"
    return "guided decoding needs the tokenizer" if arguments.get("skip_tokenizer_init") else ""


def _contradictions(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the types allow and the engine refuses later."""
    graphs = arguments.get("cuda_graph_config") or {}
    sizes, most = graphs.get("batch_sizes"), graphs.get("max_batch_size")
    if sizes and most and most != max(sizes):
        yield "cuda_graph_config.max_batch_size: must be 0 or the largest of batch_sizes"
    speculative = arguments.get("speculative_config") or {}
    if speculative.get("decoding_type") == "Eagle" and not speculative.get("max_draft_len"):
        yield "speculative_config.max_draft_len: Eagle needs it"
    if speculative.get("decoding_type") == "NGram" and not speculative.get("max_matching_ngram_size"):
        yield "speculative_config.max_matching_ngram_size: NGram needs it, since 1.2.1 has 0 as its default"
    if arguments.get("sampler_type") == "TRTLLMSampler" and speculative:
        yield "sampler_type: TRTLLMSampler does not check drafts; leave it out with speculative_config"
    if arguments.get("guided_decoding_backend") and (reason := _guides_fail(arguments)):
        yield f"guided_decoding_backend: {reason}"
    per_node = arguments.get("gpus_per_node")
    if per_node is not None and per_node < 1:
        yield "gpus_per_node: must be at least 1"
    if (
        _get(arguments, "kv_cache_config", "event_buffer_max_size")
        and _get(arguments, "kv_cache_config", "enable_block_reuse") is False
    ):
        yield "kv_cache_config.event_buffer_max_size: KV-cache events need enable_block_reuse"
    yield from _offload_contradictions(arguments)


def _offload_contradictions(arguments: Mapping[str, Any]) -> Iterator[str]:
    cache = arguments.get("kv_cache_config") or {}
    if cache.get("host_cache_size") and cache.get("enable_block_reuse") is False:
        yield "kv_cache_config.host_cache_size: blocks are kept for reuse, which enable_block_reuse turns off"
    priority = cache.get("secondary_offload_min_priority")
    if priority is not None and not 0 <= priority <= 100:
        yield "kv_cache_config.secondary_offload_min_priority: must be from 0 to 100"
    if priority is not None and not cache.get("host_cache_size"):
        yield "kv_cache_config.secondary_offload_min_priority: nothing is offloaded without host_cache_size"
    if arguments.get("kv_connector_config"):
        policy = _get(arguments, "scheduler_config", "capacity_scheduler_policy")
        if policy not in (None, "GUARANTEED_NO_EVICT"):
            yield "kv_connector_config: a KV connector needs the scheduler policy GUARANTEED_NO_EVICT"


def _update(target: dict[str, Any], values: Mapping[str, Any], layer: str, origins: dict[str, str], path: str) -> None:
    """Merge mappings; an empty one adds nothing. Other values replace, and so does a mapping in the place of another
    value.
    """
    for name, value in values.items():
        dotted, old = f"{path}{name}", target.get(name)
        if isinstance(value, Mapping) and value:
            if not old or not isinstance(old, dict):
                _forget(origins, dotted)
                target[name] = {}
            _update(target[name], value, layer, origins, f"{dotted}.")
        elif not (isinstance(value, Mapping) and isinstance(old, dict)):
            _forget(origins, dotted)
            target[name] = copy.deepcopy(value)
            origins[dotted] = layer


def _forget(origins: dict[str, str], dotted: str) -> None:
    for key in [key for key in origins if key == dotted or key.startswith(f"{dotted}.")]:
        del origins[key]


def _get(arguments: Mapping[str, Any], *path: str) -> Any:
    value: Any = arguments
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _message(entry: Mapping[str, Any]) -> str:
    return "TensorRT-LLM 1.2.1 has no such argument" if entry["type"] == "extra_forbidden" else str(entry["msg"])
