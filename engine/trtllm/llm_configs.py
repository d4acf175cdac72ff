"""The nested configurations of TensorRT-LLM 1.2.1's `LLM`, as models that refuse what it would refuse.

Names, order, types and defaults are those of `tensorrt_llm.llmapi.llm_args`; a test holds them against the contract.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field


class Arguments(BaseModel):
    """Unknown fields are errors, as they are there."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class KvCacheConfig(Arguments):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    tokens_per_block: int = 32


class DynamicBatchConfig(Arguments):
    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


class SchedulerConfig(Arguments):
    capacity_scheduler_policy: Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


class CudaGraphConfig(Arguments):
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


class MoeConfig(Arguments):
    backend: Literal["CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = "CUTLASS"
    max_num_tokens: int | None = None
    load_balancer: Any = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class Nvfp4GemmConfig(Arguments):
    allowed_backends: list[Literal["cutlass", "cublaslt", "cutedsl", "cuda_core"]] = [
        "cutlass",
        "cublaslt",
        "cuda_core",
    ]


class AttentionDpConfig(Arguments):
    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10


class CacheTransceiverConfig(Arguments):
    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = Field(None, gt=0)
    kv_transfer_sender_future_timeout_ms: int | None = Field(1000, gt=0)


class TorchCompileConfig(Arguments):
    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: list[int] | None = None
    enable_userbuffers: bool = True
    max_num_streams: int = 1


class KvCacheConnectorConfig(Arguments):
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


class PeftCacheConfig(Arguments):
    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float = 0.02
    host_cache_size: int = 1073741824
    lora_prefetch_dir: str | None = None


class RayPlacementConfig(Arguments):
    defer_workers_init: bool = False
    placement_groups: list[Any] | None = None
    placement_bundle_indices: list[list[int]] | None = None
    per_worker_gpu_share: float | None = Field(None, gt=0, le=1)


class LoraConfig(Arguments):
    lora_dir: list[str] = []
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = []
    trtllm_modules_to_hf_modules: dict[str, str] = {}
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    swap_gate_up_proj: bool = True


class DecodingBaseConfig(Arguments):
    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | None = Field(
        None, validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_window: int | None = None
    acceptance_length_threshold: float | None = None
    allow_advanced_sampling: bool = False


class EagleDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["Eagle"]
    eagle_choices: list[list[int]] | None = None
    greedy_sampling: bool | None = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: int | None = None  # noqa: N815 - its name there
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: set[int] | None = None
    eagle3_model_arch: str = "llama3"


class MTPDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["MTP"]
    num_nextn_predict_layers: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    num_nextn_predict_layers_from_model_config: int = 1
    begin_thinking_phase_token: int = 128798
    end_thinking_phase_token: int = 128799


class NGramDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["NGram"]
    max_matching_ngram_size: int = 0
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


class DraftTargetDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["DraftTarget"]


class UserProvidedDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["UserProvided"]
    drafter: Any
    resource_manager: Any = None


class SaveHiddenStatesDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["SaveState"]
    output_directory: str
    write_interval: int = 20
    file_prefix: str = "data"
    eagle3_layers_to_capture: set[int] | None = None
    max_total_draft_tokens: int | None = 1
    eagle_choices: list[list[int]] | None = None


class AutoDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["AUTO"]


class RocketSparseAttentionConfig(Arguments):
    algorithm: Literal["rocket"]
    seq_len_threshold: int | None = None
    window_size: int | None = 32
    kernel_size: int | None = 63
    topr: int | float | None = 128
    topk: int | None = 64
    prompt_budget: int | None = 2048
    page_size: int | None = 4
    kt_cache_dtype: str | None = "float8_e5m2"


class DeepSeekSparseAttentionConfig(Arguments):
    algorithm: Literal["dsa"]
    seq_len_threshold: int | None = None
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    index_topk: int | None = None
    indexer_max_chunk_size: int | None = None
    skip_indexer_for_short_seqs: bool = True


class SkipSoftmaxAttentionConfig(Arguments):
    algorithm: Literal["skip_softmax"]
    seq_len_threshold: int | None = None
    threshold_scale_factor: float | dict[Literal["prefill", "decode"], float] | None = None


SpeculativeConfig = Annotated[
    EagleDecodingConfig
    | MTPDecodingConfig
    | NGramDecodingConfig
    | DraftTargetDecodingConfig
    | UserProvidedDecodingConfig
    | SaveHiddenStatesDecodingConfig
    | AutoDecodingConfig,
    Field(discriminator="decoding_type"),
]
SparseAttentionConfig = Annotated[
    RocketSparseAttentionConfig | DeepSeekSparseAttentionConfig | SkipSoftmaxAttentionConfig,
    Field(discriminator="algorithm"),
]
