"""Every setting, parsed once at start and frozen. The only place that reads the environment.

Flags (`--max-batch-size 16`), environment variables (`MAX_BATCH_SIZE=16`) and a `.env` file set the same values, in that order of
precedence. `settings.env.example` lists them in the order of this class; a test holds the two together.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from protocol.common import MAX_MESSAGES
from server.settings.media import MediaSettings
from server.settings.observability import ObservabilitySettings
from server.settings.routing import RoutingSettings
from server.settings.types import Names, Secrets, Urls

DEFAULT_MODEL = "smollm2-135m-instruct"
_ROLE_ALIASES = {"agg": "aggregated", "pd": "aggregated", "prefill_and_decode": "aggregated"}


class EngineArgsError(SettingsError):
    """Arguments for the engine are wrong; one line for each fault, with the setting that holds it."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


class _ReplicaSettings(BaseSettings):
    """All that have no file of their own; they come first."""

    # Model
    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        validation_alias=AliasChoices("model", "model_path"),
        description="Hugging Face folder or id, or the packaged smollm2-135m-instruct, smolvision or gemma-3-270m",
    )
    served_model_name: str = Field("", description="Name in /v1/models and in requests; empty takes the model's own")
    chat_template: Path | None = Field(None, description="Jinja file used instead of the model's chat template")
    cache_dir: Path = Field(Path("~/.cache/trellis"), description="Folder for converted models")

    # Engine
    engine: Literal["embedded", "trtllm", "fake"] = Field(
        "embedded", description="Backend: embedded (PyTorch), trtllm (TensorRT-LLM) or fake (deterministic, no model)"
    )
    disaggregation_mode: Literal["aggregated", "prefill", "decode", "encode", "router"] = Field(
        "aggregated",
        description="Role of this replica: aggregated does all, decode has prompts computed by prefill replicas, encode does images alone, "
        "router has no model and chooses among replicas",
    )
    engine_process: bool = Field(
        True, description="Run the engine in a process of its own; false runs it in the API process, for debugging"
    )
    engine_on_death: Literal["restart", "exit"] = Field(
        "restart", description="When the engine process dies: restart it with back-off, or exit non-zero"
    )
    engine_address: str = Field(
        "", description="Address of an engine host that runs already (ipc:// or tcp://); empty starts one"
    )
    device: str = Field("auto", description="Torch device; auto takes CUDA when there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and KV cache; auto takes bfloat16 on a GPU and float32 on a CPU, whichever it is",
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="Quantise weights at load (embedded engine, NVIDIA GPUs from compute capability 9.0): none or fp8",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Type of the KV cache, on such GPUs: auto takes that of the weights, fp8 has room for twice the tokens",
    )
    max_seq_len: int = Field(0, ge=0, description="Context length in tokens; 0 takes the model's")
    max_batch_size: int = Field(32, ge=1, le=4096, description="Most sequences in one step")
    max_num_tokens: int = Field(
        1024, ge=1, description="Most tokens in one step: the budget that chunked prefill and decode share"
    )
    kv_block_size: int = Field(32, ge=1, le=1024, description="Tokens in a KV block")
    kv_cache_memory_mb: int = Field(384, ge=1, description="Memory for KV blocks in MiB, on a CPU")
    free_gpu_memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Part of the free device memory taken for KV blocks, on a GPU"
    )
    enable_block_reuse: bool = Field(True, description="Reuse the KV blocks of equal prefixes")
    enable_chunked_prefill: bool = Field(True, description="Split long prompts over several steps")
    attention: Literal["auto", "sdpa", "flashinfer"] = Field(
        "auto",
        description="Attention of the embedded engine: flashinfer (CUDA, with CUDA graphs), sdpa (torch's, any device); auto chooses",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="Weights from the model's files, or random ones, for measuring"
    )
    overlap_scheduler: Literal["auto", "on", "off"] = Field(
        "auto", description="Prepare the next step of the embedded engine while the device computes; auto does on a GPU"
    )
    enable_cuda_graphs: bool = Field(True, description="Run steps of few tokens as CUDA graphs")
    threads: int = Field(
        0,
        ge=0,
        description="Compute threads of the embedded engine; 0 takes the cores that it may use, a container's quota counted in",
    )
    cpu_isa: Literal["auto", "portable", "avx2", "avx512"] = Field(
        "auto",
        description="Instruction set of the embedded engine's compiled path on a CPU; auto takes the fastest that the processor has",
    )
    fake_token_delay_ms: float = Field(
        0.0, ge=0, description="Pause between the tokens of the fake engine, in milliseconds"
    )

    # Disaggregation
    prefill_urls: Urls = Field(
        (),
        description="Comma-separated prefill replicas for a decode replica: http://host:port, or dns+http://name:port for all addresses",
    )
    prefill_fallback: Literal["local", "refuse"] = Field(
        "local",
        description="Without a prefill replica, decode computes the prompt itself (local) or answers 503 (refuse)",
    )
    prefill_min_tokens: int = Field(
        32,
        ge=0,
        description="Shorter prompts are computed by the decode replica itself, unless PREFILL_FALLBACK is refuse",
    )
    prefill_attempts: int = Field(
        3, ge=1, description="Most prefill replicas that are asked for one request, one after the other"
    )
    lease_seconds: float = Field(
        30.0, gt=0, description="How long a prefill replica holds KV blocks that nobody has fetched"
    )
    kv_transfer: Literal["auto", "shared_memory", "cuda_ipc", "nixl", "tcp"] = Field(
        "auto",
        description="How KV blocks move between replicas of the embedded engine; auto takes the best that both have",
    )
    kv_transfer_port: int = Field(
        0, ge=0, le=65535, description="Port on which KV blocks are served by TCP; 0 takes a free one"
    )
    transfer_timeout_seconds: float = Field(
        5.0,
        gt=0,
        description="How long decode may take to read a prompt's KV blocks before it computes the prompt itself",
    )

    # TensorRT-LLM
    backend: Literal["pytorch", "_autodeploy"] = Field("pytorch", description="TensorRT-LLM's own backend")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share each layer")
    pipeline_parallel_size: int = Field(1, ge=1, description="GPUs that share the layers in turn")
    expert_parallel_size: int = Field(
        0, ge=0, description="GPUs that share the experts of a mixture; 0 leaves it to the engine"
    )
    enable_attention_dp: bool = Field(False, description="Attention in data parallel over the tensor-parallel GPUs")
    gpus_per_node: int = Field(0, ge=0, description="GPUs of a node; 0 takes those that are visible")
    guided_decoding_backend: Literal["xgrammar", "llguidance"] = Field(
        "xgrammar", description="Library for structured output"
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the model")
    publish_kv_events: bool = Field(
        False,
        validation_alias=AliasChoices("publish_kv_events", "publish_events_and_metrics"),
        description="Keep KV-cache events for routers",
    )
    extra_engine_args: Path | None = Field(
        None, description="YAML file of arguments of TensorRT-LLM's LLM, over the settings"
    )
    override_engine_args: str = Field("", description="JSON object of such arguments, over the file")

    # Tests
    enable_test_logits_processor: bool = Field(
        False,
        validation_alias=AliasChoices("enable_test_logits_processor", "dyn_enable_test_logits_processor"),
        description="Answer every request with Hello world!, by a logits processor in the engine",
    )

    # HTTP
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    api_processes: int = Field(1, ge=1, le=64, description="API processes that share the port and the engine")
    root_path: str = Field("", description="Path prefix that a proxy strips")
    api_keys: Secrets = Field(
        (),
        description="Comma-separated keys, one of which every route but liveness requires; empty leaves the server open",
    )
    internal_secret: SecretStr | None = Field(None, description="Secret of the internal routes between replicas")
    cors_origins: Names = Field(
        (), description="Comma-separated origins that browsers may call from; empty allows none"
    )
    docs: bool = Field(True, description="Serve /docs and /openapi.json")
    keep_alive_seconds: int = Field(
        75, ge=1, description="How long an idle connection stays open; more than the proxy's own limit"
    )
    sse_ping_seconds: float = Field(
        15.0, ge=0, description="Seconds of silence before a keep-alive comment; 0 sends none"
    )
    shutdown_grace_seconds: float = Field(30.0, ge=0, description="How long running requests may go on after SIGTERM")

    # Limits
    max_body_mb: float = Field(64.0, gt=0, description="Largest request body in MiB")
    body_timeout_seconds: float = Field(
        60.0, gt=0, description="How long a client may take to send its headers, and then its body"
    )
    request_timeout_seconds: float = Field(600.0, gt=0, description="Deadline of a whole request")
    max_queue_size: int = Field(
        1024, ge=0, description="Sequences that may wait for the engine before requests are refused with 429"
    )
    queue_timeout_seconds: float = Field(
        60.0, gt=0, description="Longest wait for the engine before a request is refused with 503"
    )
    max_n: int = Field(128, ge=1, description="Most choices of one request, prompts times n")
    max_messages: int = Field(4096, ge=1, le=MAX_MESSAGES, description="Most messages in a chat")
    max_stop: int = Field(16, ge=0, description="Most stop strings")
    max_logit_bias: int = Field(1024, ge=0, description="Most entries of logit_bias, bad_words and the like")
    max_top_logprobs: int = Field(20, ge=0, le=1000, description="Most alternatives reported for a token")
    max_schema_kb: int = Field(64, ge=1, description="Largest JSON schema, regular expression or grammar in KiB")
    max_schema_depth: int = Field(32, ge=1, description="Deepest nesting of a JSON schema")
    guide_timeout_seconds: float = Field(
        15.0, gt=0, description="Longest compilation of a schema, regular expression or grammar"
    )
    chat_template_kwargs: Names = Field(
        ("enable_thinking", "thinking", "reasoning_effort", "documents", "custom_instructions"),
        description="Comma-separated template variables that requests may set",
    )
    strict_fields: bool = Field(False, description="Refuse unknown request fields with 400 instead of ignoring them")

    # Logs
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe messages shown")
    log_format: Literal["text", "json"] = Field("text", description="Lines for people or for machines")
    access_log: bool = Field(False, description="Log every request")

    @field_validator("disaggregation_mode", mode="before")
    @classmethod
    def _role(cls, value: object) -> object:
        return _ROLE_ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("api_processes", mode="after")
    @classmethod
    def _one_engine(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and not info.data.get("engine_process", True):
            raise ValueError("several API processes share an engine of its own process: engine_process must be true")
        return value

    @field_validator("quantization", "kv_cache_dtype", mode="after")
    @classmethod
    def _embedded_only(cls, value: str, info: ValidationInfo) -> str:
        engine = info.data.get("engine", "embedded")
        if value == "fp8" and engine != "embedded":
            more = "; TensorRT-LLM's own are arguments (EXTRA_ENGINE_ARGS)" if engine == "trtllm" else ""
            raise ValueError(f"fp8 is for the embedded engine, not for {engine}{more}")
        return value

    @field_validator("enable_test_logits_processor", mode="after")
    @classmethod
    def _has_logits(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("engine") == "fake":
            raise ValueError("the fake engine has no logits")
        return value

    @field_validator("chat_template", "extra_engine_args", "internal_secret", mode="before")
    @classmethod
    def _none_if_empty(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("cache_dir", "chat_template", "extra_engine_args", mode="after")
    @classmethod
    def _expanded(cls, value: Path | None) -> Path | None:
        return value.expanduser() if value is not None else None


class Settings(RoutingSettings, ObservabilitySettings, MediaSettings, _ReplicaSettings):
    """Settings of one replica: flags, environment variables (MAX_BATCH_SIZE=16) or lines of .env. --version prints the version."""

    model_config = SettingsConfigDict(
        env_file=".env",
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        populate_by_name=True,
        cli_prog_name="python -m server",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
    )


def read_settings(arguments: Sequence[str]) -> Settings:
    """The settings of a command line, the environment and `.env`. Raises ValidationError and SettingsError; `--help` exits."""
    return CliApp.run(Settings, cli_args=list(arguments))


def role_shortage(settings: Settings) -> tuple[str, str] | None:
    """The setting that the role lacks, and why; None if it lacks nothing."""
    role = settings.disaggregation_mode
    if role not in ("aggregated", "router") and settings.internal_secret is None:
        return "--internal-secret (INTERNAL_SECRET)", f"the role {role} needs it: replicas know each other by it"
    if role == "decode" and not settings.prefill_urls:
        return "--prefill-urls (PREFILL_URLS)", "the role decode needs it: it says which replicas prefill"
    if role == "router" and not settings.route_urls:
        return "--route-urls (ROUTE_URLS)", "the role router needs it: it says among which replicas to choose"
    if role == "router" and settings.api_processes > 1:
        return "--api-processes (API_PROCESSES)", "the role router has one: it knows what all replicas have to do"
    if role == "encode" and settings.api_processes > 1:
        return "--api-processes (API_PROCESSES)", "the role encode has one: each would load the model's vision tower"
    if settings.encode_urls and settings.internal_secret is None:
        return "--internal-secret (INTERNAL_SECRET)", "ENCODE_URLS needs it: replicas know each other by it"
    return None


def child_environment(**variables: str) -> dict[str, str]:
    """The environment for a child process: this one's and `variables`."""
    return {**os.environ, **variables}


def provide(name: str, value: str) -> None:
    """Set an environment variable for this process and its children, unless it is set already."""
    os.environ.setdefault(name, value)


def visible_devices() -> str | None:
    """What CUDA_VISIBLE_DEVICES says; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def example() -> str:
    """The text of settings.env.example: every setting with its description and default."""
    lines = [
        "# Every setting with its default. Copy to .env, or set in the environment, or pass as flags: MAX_BATCH_SIZE is --max-batch-size.",
        "",
    ]
    for name, info in Settings.model_fields.items():
        default = info.get_default(call_default_factory=True)
        value = "" if default is None else ",".join(default) if isinstance(default, tuple) else str(default)
        if isinstance(default, bool):
            value = value.lower()
        lines += [f"# {info.description}", f"# {name.upper()}={value}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(example())
