"""`tensorrt_llm.llmapi.llm_args`: every configuration model and enumeration of the contract."""

import copy
from pathlib import Path
from typing import Any

import yaml

from tensorrt_llm._models import MODELS, NAMES

__all__ = ["update_llm_args_with_extra_dict", "update_llm_args_with_extra_options"]

_ELSEWHERE = {"LlmArgs", "LoraConfig", "SpeculativeConfig", "SparseAttentionConfig", "GuidedDecodingBackend"}
globals().update({name: value for name, value in NAMES.items() if name not in _ELSEWHERE})

_CONVERTED = {
    "moe_config": "MoeConfig",
    "nvfp4_gemm_config": "Nvfp4GemmConfig",
    "attention_dp_config": "AttentionDpConfig",
    "kv_cache_config": "KvCacheConfig",
}


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any], extra_llm_api_options: str | None = None
) -> dict[str, Any]:
    """Lay `llm_args_dict` over `llm_args`; `kv_cache_config` is merged key by key, everything else replaced."""
    extra = dict(llm_args_dict)
    if isinstance(extra.get("kv_cache_config"), dict) and "kv_cache_config" in llm_args:
        base = llm_args["kv_cache_config"]
        extra["kv_cache_config"] = (base if isinstance(base, dict) else base.model_dump(exclude_unset=True)) | extra[
            "kv_cache_config"
        ]
    for name, model in _CONVERTED.items():
        if isinstance(extra.get(name), dict):
            extra[name] = MODELS[model](**extra[name])
    for name, base in {
        "speculative_config": "DecodingBaseConfig",
        "sparse_attention_config": "RocketSparseAttentionConfig",
    }.items():
        if isinstance(extra.get(name), dict):
            extra[name] = MODELS[base].from_dict(extra[name])
    if isinstance(extra.get("lora_config"), dict):
        extra["lora_config"] = NAMES["LoraConfig"](**extra["lora_config"])
    return copy.copy(llm_args) | extra


def update_llm_args_with_extra_options(llm_args: dict[str, Any], extra_llm_api_options: str | None) -> dict[str, Any]:
    """Lay a YAML file over `llm_args`. An empty file fails, as it does in 1.2.1."""
    if extra_llm_api_options is None:
        return llm_args
    extra = yaml.safe_load(Path(extra_llm_api_options).read_text(encoding="utf-8"))
    return update_llm_args_with_extra_dict(llm_args, extra, extra_llm_api_options)
