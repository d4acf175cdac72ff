"""Settings of the model and of the engine that runs it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings

from engine.config import EmbeddedConfig, TrtllmConfig
from server.roles import RoleName
from server.settings.types import PathOrNone, default

DEFAULT_MODEL = "smollm2-135m-instruct"
_ROLE_ALIASES = {"agg": "aggregated", "pd": "aggregated", "prefill_and_decode": "aggregated"}


def _role(value: object) -> object:
    return _ROLE_ALIASES.get(value, value) if isinstance(value, str) else value


class EngineSettings(BaseSettings):
    """The model, the role, and what every backend or the embedded engine is told."""

    # Model
    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        validation_alias=AliasChoices("model", "model_path"),
        description="Hugging Face folder or id, or the packaged smollm2-135m-instruct, smolvision or gemma-3-270m",
    )
    served_model_name: str = Field("", description="Name in /v1/models and in requests; empty takes the model's own")
    chat_template: PathOrNone = Field(None, description="Jinja file used instead of the model's chat template")
    cache_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        Path("~/.cache/trellis"), description="Folder for converted models"
    )

    # Engine
    engine: Literal["embedded", "trtllm", "fake"] = Field(
        "embedded", description="Backend: embedded (PyTorch), trtllm (TensorRT-LLM) or fake (deterministic, no model)"
    )
    disaggregation_mode: Annotated[RoleName, BeforeValidator(_role)] = Field(
        "aggregated",
        description="Role of this replica: aggregated does everything, prefill computes prompts for decode replicas, "
        "decode generates after remote prefill, encode encodes images for other replicas, router has no model and "
        "forwards to replicas",
    )
    engine_process: bool = Field(
        True, description="Run the engine in a process of its own; false runs it in the API process, for debugging"
    )
    engine_on_death: Literal["restart", "exit"] = Field(
        "restart", description="When the engine process dies: restart it with back-off, or exit with a non-zero code"
    )
    engine_address: str = Field(
        "", description="Address of an engine host that is already running (ipc:// or tcp://); empty starts one"
    )
    device: str = Field(
        default(EmbeddedConfig, "device"), description="PyTorch device; auto takes CUDA when it is available"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default(EmbeddedConfig, "dtype"),
        description="Type of weights and KV cache; auto takes bfloat16 on a GPU and float32 on any CPU",
    )
    quantization: Literal["none", "fp8"] = Field(
        default(EmbeddedConfig, "quantization"),
        description="Quantize weights at load (embedded engine, NVIDIA GPUs from compute capability 9.0): none or fp8",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default(EmbeddedConfig, "kv_cache_dtype"),
        description="Type of the KV cache, on the same GPUs: auto takes the weights' type, fp8 holds twice as many "
        "tokens",
    )
    max_seq_len: int = Field(
        default(EmbeddedConfig, "max_seq_len"), ge=0, description="Context length in tokens; 0 takes the model's"
    )
    max_batch_size: int = Field(
        default(EmbeddedConfig, "max_batch_size"), ge=1, le=4096, description="Maximum number of sequences in one step"
    )
    max_num_tokens: int = Field(
        default(EmbeddedConfig, "max_num_tokens"),
        ge=1,
        description="Maximum number of tokens in one step, shared by chunked prefill and decode",
    )
    kv_block_size: int = Field(
        default(EmbeddedConfig, "kv_block_size"), ge=1, le=1024, description="Number of tokens in a KV block"
    )
    kv_cache_memory_mb: int = Field(
        default(EmbeddedConfig, "kv_cache_memory_mb"), ge=1, description="Memory for KV blocks on a CPU, in MiB"
    )
    free_gpu_memory_fraction: float = Field(
        default(EmbeddedConfig, "free_gpu_memory_fraction"),
        gt=0,
        le=1,
        description="Fraction of the free GPU memory used for KV blocks",
    )
    enable_block_reuse: bool = Field(
        default(EmbeddedConfig, "enable_block_reuse"), description="Reuse the KV blocks of equal prefixes"
    )
    enable_chunked_prefill: bool = Field(
        default(EmbeddedConfig, "enable_chunked_prefill"), description="Split long prompts over several steps"
    )
    attention: Literal["auto", "sdpa", "flashinfer"] = Field(
        default(EmbeddedConfig, "attention"),
        description="Attention of the embedded engine: flashinfer (CUDA, with CUDA graphs) or sdpa (PyTorch, any "
        "device); auto chooses",
    )
    load_format: Literal["auto", "dummy"] = Field(
        default(EmbeddedConfig, "load_format"),
        description="Weights: auto reads the model's files, dummy makes random ones, for measurements",
    )
    overlap_scheduler: Literal["auto", "on", "off"] = Field(
        default(EmbeddedConfig, "overlap_scheduler"),
        description="Prepare the next step of the embedded engine while the device computes; auto does so on a GPU",
    )
    enable_cuda_graphs: bool = Field(
        default(EmbeddedConfig, "enable_cuda_graphs"), description="Run steps with few tokens as CUDA graphs"
    )
    threads: int = Field(
        default(EmbeddedConfig, "threads"),
        ge=0,
        description="Compute threads of the embedded engine; 0 takes the available cores, within the container's CPU "
        "quota",
    )
    cpu_isa: Literal["auto", "portable", "avx2", "avx512"] = Field(
        default(EmbeddedConfig, "cpu_isa"),
        description="Instruction set of the embedded engine's compiled path on a CPU; auto takes the fastest that the "
        "processor has",
    )
    fake_token_delay_ms: float = Field(
        0.0, ge=0, description="Pause between two tokens of the fake engine, in milliseconds"
    )

    @field_validator("quantization", "kv_cache_dtype", mode="after")
    @classmethod
    def _embedded_only(cls, value: str, info: ValidationInfo) -> str:
        engine = info.data.get("engine", "embedded")
        if value == "fp8" and engine != "embedded":
            more = "; TensorRT-LLM's own are arguments (EXTRA_ENGINE_ARGS)" if engine == "trtllm" else ""
            raise ValueError(f"fp8 is for the embedded engine, not for {engine}{more}")
        return value


class TrtllmSettings(BaseSettings):
    """What TensorRT-LLM is told, and the logits processor for tests."""

    # TensorRT-LLM
    backend: Literal["pytorch", "_autodeploy"] = Field(
        default(TrtllmConfig, "backend"), description="Backend inside TensorRT-LLM"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Number of GPUs that share each layer")
    pipeline_parallel_size: int = Field(1, ge=1, description="Number of pipeline stages, each on GPUs of its own")
    expert_parallel_size: int = Field(
        0, ge=0, description="Number of GPUs that share the experts of a mixture of experts; 0 lets the engine choose"
    )
    enable_attention_dp: bool = Field(
        False, description="Run attention data-parallel over the GPUs of the tensor-parallel group"
    )
    gpus_per_node: int = Field(0, ge=0, description="Number of GPUs in a node; 0 takes the visible ones")
    guided_decoding_backend: Literal["xgrammar", "llguidance"] = Field(
        "xgrammar", description="Library for structured output"
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the model")
    publish_kv_events: bool = Field(
        False,
        validation_alias=AliasChoices("publish_kv_events", "publish_events_and_metrics"),
        description="Publish KV-cache events for routers",
    )
    extra_engine_args: PathOrNone = Field(
        None, description="YAML file with arguments of TensorRT-LLM's LLM; they override the settings"
    )
    override_engine_args: str = Field(
        "", description="JSON object with arguments of TensorRT-LLM's LLM; they override EXTRA_ENGINE_ARGS"
    )

    # Tests
    enable_test_logits_processor: bool = Field(
        False,
        validation_alias=AliasChoices("enable_test_logits_processor", "dyn_enable_test_logits_processor"),
        description="Answer every request with Hello world!, by a logits processor in the engine, to test that "
        "processors work",
    )

    @field_validator("enable_test_logits_processor", mode="after")
    @classmethod
    def _has_logits(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("engine") == "fake":
            raise ValueError("the fake engine has no logits")
        return value
