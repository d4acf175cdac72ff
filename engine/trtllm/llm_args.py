"""The arguments of TensorRT-LLM 1.2.1's `LLM`, as models that refuse what it would refuse, before a GPU is needed.

Names, order, types and defaults are those of `tensorrt_llm.llmapi.llm_args`; a test holds them against the contract.
"""

from typing import Any, Literal

from pydantic import Field

from engine.trtllm.llm_configs import (
    Arguments,
    AttentionDpConfig,
    CacheTransceiverConfig,
    CudaGraphConfig,
    KvCacheConfig,
    KvCacheConnectorConfig,
    LoraConfig,
    MoeConfig,
    Nvfp4GemmConfig,
    PeftCacheConfig,
    RayPlacementConfig,
    SchedulerConfig,
    SparseAttentionConfig,
    SpeculativeConfig,
    TorchCompileConfig,
)  # fmt: skip


class BaseLlmArgs(Arguments):
    """What every backend takes. `mpi_session` is left out: it is an object of the caller's own."""

    model: str
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    custom_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    pp_partition: list[int] | None = None
    cp_config: dict[str, Any] | None = {}
    fail_fast_on_attention_window_too_large: bool = False
    enable_lora: bool = False
    lora_config: LoraConfig | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    peft_cache_config: PeftCacheConfig | None = None
    scheduler_config: SchedulerConfig = SchedulerConfig()
    cache_transceiver_config: CacheTransceiverConfig | None = None
    sparse_attention_config: SparseAttentionConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_beam_width: int | None = None
    max_num_tokens: int | None = 8192
    gather_generation_logits: bool = False
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    decoding_config: Any = None
    otlp_traces_endpoint: str | None = None
    backend: str | None = None
    return_perf_metrics: bool = False
    orchestrator_type: Literal["rpc", "ray"] | None = None
    env_overrides: dict[str, str] | None = None


class TorchLlmArgs(BaseLlmArgs):
    """`backend="pytorch"`."""

    garbage_collection_gen0_threshold: int = 20000
    cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig()
    attention_dp_config: AttentionDpConfig | None = None
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = MoeConfig()
    nvfp4_gemm_config: Nvfp4GemmConfig = Nvfp4GemmConfig()
    attn_backend: str = "TRTLLM"
    sampler_type: Literal["TRTLLMSampler", "TorchSampler", "auto"] = "auto"
    sampler_force_async_worker: bool = False
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    perf_metrics_max_requests: int = 0
    batch_wait_timeout_ms: float = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0
    torch_compile_config: TorchCompileConfig | None = None
    enable_autotuner: bool = True
    enable_layerwise_nvtx_marker: bool = False
    load_format: Literal["auto", "dummy", "vision_only", "AUTO", "DUMMY", "VISION_ONLY"] = "auto"
    enable_min_latency: bool = False
    stream_interval: int = 1
    force_dynamic_quantization: bool = False
    allreduce_strategy: (
        Literal["AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"]
        | None
    ) = "AUTO"
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    kv_connector_config: KvCacheConnectorConfig | None = None
    mm_encoder_only: bool = False
    ray_worker_extension_cls: str | None = None
    ray_placement_config: RayPlacementConfig | None = None
    enable_sleep: bool = False
    disable_flashinfer_sampling: bool = False
    max_stats_len: int = 1000


class AutoDeployLlmArgs(TorchLlmArgs):
    """`backend="_autodeploy"`: dated after 1.2.1 in the contract, so that it says no more than which names are known."""

    model_factory: str = "AutoModelForCausalLM"
    model_kwargs: dict[str, Any] = {}
    speculative_model_kwargs: dict[str, Any] = {}
    skip_loading_weights: bool = False
    tokenizer_kwargs: dict[str, Any] = {}
    world_size: int = Field(1, ge=0)
    runtime: Literal["demollm", "trtllm"] = "trtllm"
    draft_checkpoint_loader: Any = None
    mode: Literal["graph", "transformers", "export_edgellm_onnx"] = "graph"
    transforms: dict[str, Any] = {}
    compile_backend: str = "torch-cudagraph"
    device: str = "cuda"
