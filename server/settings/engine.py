"""Settings of the model and of the engine that runs it."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationInfo, field_validator

from engine.checkpoints.packaged import HEADS
from engine.config import CpuIsa, SleepConfig, TrtllmConfig
from engine.memory.service import GRACE_SECONDS as MEMORY_GRACE_SECONDS
from engine.process.wire import Standby
from multimodal.answers.parsers.choose import family
from multimodal.answers.parsers.response_templates import RESPONSE_TEMPLATE
from server.settings.types import EMBEDDED, ExpandedPath, PathOrNone, Section

RoleName = Literal["aggregated", "prefill", "decode", "encode", "router"]
"""The roles of a replica; `server/roles.py` has their records."""
DEFAULT_MODEL = "smollm2-135m-instruct"
_LEAST_HANG_SECONDS = 10.0
_LONGEST_SOCKET = 107
_ROLE_ALIASES = {"agg": "aggregated", "pd": "aggregated", "prefill_and_decode": "aggregated"}


def _role(value: object) -> object:
    return _ROLE_ALIASES.get(value, value) if isinstance(value, str) else value


class ModelSettings(Section):
    """Settings of the served model and its files."""

    group = "Model"

    model: str = Field(DEFAULT_MODEL, min_length=1, validation_alias=AliasChoices("model", "model_path"))
    """Hugging Face folder or id, GGUF file, or a built-in model: smollm2-135m-instruct, smolvision, smolvideo,
    smolaudio, smoldraw, smoldraw-clips, gemma-3-270m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b or whisper-tiny.en.
    `trellis models` lists them.
    """
    served_model_name: str = ""
    """Name in /v1/models and in requests; empty takes the model's own."""
    chat_template: PathOrNone = None
    """Jinja file used instead of the model's chat template."""
    tool_call_parser: str = "auto"
    """Notation of the model's tool calls: hermes, llama3_json, mistral or another name in docs/agents.md; auto decides
    by chat template and model type, response_template takes the model's own, none has no tools.
    """
    reasoning_parser: str = "auto"
    """Notation of the model's reasoning: deepseek_r1, qwen3 or another name in docs/agents.md; auto decides by chat
    template and model type, response_template takes the model's own, none takes reasoning for text.
    """
    sampling_defaults: Literal["model", "openai"] = "model"
    """Sampling parameters of requests that do not set them: temperature, top_p, top_k, min_p and repetition_penalty of
    the model's generation_config.json, as in vLLM, or OpenAI's defaults.
    """
    thinking_token_budget: int = Field(-1, ge=-1)
    """Maximum number of tokens of reasoning in a choice, where the request sets no limit: its end is then forced. -1 is
    no limit."""
    stream_tool_arguments: bool = True
    """Stream the arguments of tool calls as they come; false streams whole calls, and one that never completes as text.
    """
    cache_dir: ExpandedPath = Path("~/.cache/trellis")
    """Folder for converted models."""

    @field_validator("tool_call_parser", "reasoning_parser", mode="after")
    @classmethod
    def _known_parser(cls, value: str, info: ValidationInfo) -> str:
        if value not in ("auto", "none", RESPONSE_TEMPLATE):
            family(**{"tools" if info.field_name == "tool_call_parser" else "reasoning": value})
        return value


class EngineSettings(Section):
    """The backend, the role, and the process that runs the engine."""

    group = "Engine"

    engine: Literal["embedded", "trtllm", "fake"] = "embedded"
    """Backend: embedded (PyTorch), trtllm (TensorRT-LLM) or fake (deterministic, no model)."""
    disaggregation_mode: Annotated[RoleName, BeforeValidator(_role)] = "aggregated"
    """Role of this replica: aggregated does everything, prefill computes prompts for decode replicas, decode generates
    after remote prefill, encode encodes images for other replicas, router has no model and forwards to replicas.
    """
    engine_process: bool = True
    """Run the engine in a process of its own; false runs it in the API process, for debugging."""
    engine_on_death: Literal["restart", "exit"] = "restart"
    """Reaction to the death of the engine process: restart it with back-off, or exit with a non-zero code."""
    engine_address: str = ""
    """Address of an engine host that is already running (ipc:// or tcp://); empty starts one."""


class MemoryServiceSettings(Section):
    """Weights that outlive the engine's process, and that the replicas of a host share."""

    group = "Memory service"

    memory_service: PathOrNone = None
    """Socket of a memory service (`trellis memory`), which owns the weights of the embedded engine: replicas share
    them, and a restarted engine need not load them. Empty is off.
    """
    memory_service_limit_mb: int = Field(0, ge=0)
    """Maximum memory that `trellis memory` owns, on the host and all GPUs together, in MiB; 0 is all of it."""
    memory_service_grace_seconds: float = Field(MEMORY_GRACE_SECONDS, ge=0)
    """Seconds for which `trellis memory` keeps weights that no engine uses."""
    engine_standby: bool | Literal["auto", "imports"] = "auto"
    """Keep a second engine process, which takes over when the first one dies: true is one that has loaded the model,
    imports one that has imported the engine's code. auto is imports with MEMORY_SERVICE, and on a CPU as long as 1 GiB
    of memory is free; else false.
    """

    @property
    def standby(self) -> Standby:
        """Preparation of a second engine process, as far as the settings alone say (`server/compose/sizing.py`)."""
        if self.engine_standby == "imports" or (self.engine_standby == "auto" and self.memory_service is not None):
            return "imports"
        return "model" if self.engine_standby is True else ""

    @field_validator("memory_service", mode="after")
    @classmethod
    def _can_be_bound(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and len(os.fsencode(value)) > _LONGEST_SOCKET:
            raise ValueError(f"the path of a socket has at most {_LONGEST_SOCKET} bytes")
        if value is not None and (engine := info.data.get("engine", "embedded")) != "embedded":
            raise ValueError(f"the memory service has weights of the embedded engine, not of {engine}")
        return value

    @field_validator("engine_standby", mode="after")
    @classmethod
    def _can_take_over(cls, value: bool | str, info: ValidationInfo) -> bool | str:
        if value in (False, "auto"):
            return value
        if info.data.get("engine") == "trtllm":
            raise ValueError("TensorRT-LLM's weights cannot be loaded twice on the same GPUs, and its code starts MPI")
        if not info.data.get("engine_process", True):
            raise ValueError("needs a process for the engine: ENGINE_PROCESS=true")
        if info.data.get("engine_on_death") == "exit":
            raise ValueError("takes over when the engine dies, and ENGINE_ON_DEATH=exit ends the server: choose one")
        return value


class ComputeSettings(Section):
    """Settings of computation for the embedded engine. TensorRT-LLM takes some of these, too."""

    group = "Device and computing"

    device: str = EMBEDDED.device
    """PyTorch device; auto takes CUDA when it is available."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = EMBEDDED.dtype
    """Type of weights and KV cache; auto takes bfloat16 on a GPU and float32 on any CPU, where CPU_ISA=amx and
    avx512_bf16 still round keys, values and what weights are multiplied with; float32 prevents that."""
    quantization: Literal["none", "fp8", "int8"] = EMBEDDED.quantization
    """Quantize weights at load (embedded engine): fp8 on NVIDIA GPUs from compute capability 9.0, int8 on a CPU."""
    kv_cache_dtype: Literal["auto", "fp8"] = EMBEDDED.kv_cache_dtype
    """Type of the KV cache: auto takes the weights' type, and on a CPU that of products (CPU_ISA); fp8, on the same
    GPUs, holds twice as many tokens."""
    attention: Literal["auto", "sdpa", "flashinfer"] = EMBEDDED.attention
    """Attention of the embedded engine: flashinfer (CUDA, with CUDA graphs) or sdpa (PyTorch, any device); auto
    chooses.
    """
    load_format: Literal["auto", "dummy"] = EMBEDDED.load_format
    """Weights: auto reads the model's files, dummy makes random ones, for measurements."""
    overlap_scheduler: Literal["auto", "on", "off"] = EMBEDDED.overlap_scheduler
    """Prepare the next step of the embedded engine while the device computes; auto does so on a GPU."""
    enable_cuda_graphs: bool = EMBEDDED.enable_cuda_graphs
    """Run steps with few tokens as CUDA graphs."""
    compressed_weights: Literal["auto", "on", "off"] = EMBEDDED.compressed_weights
    """Keep copies of bfloat16 weights in 12 bits, without loss, on a GPU: a request that is alone is answered a sixth
    faster (embedded engine). auto does so if they take at most an eighth of its memory, and the weights are not in a
    MEMORY_SERVICE.
    """
    threads: int = Field(EMBEDDED.threads, ge=0)
    """Compute threads of the embedded engine, at most 16 or four for each core; 0 takes the available cores, within
    the container's CPU quota.
    """
    cpu_isa: CpuIsa = EMBEDDED.cpu_isa
    """Instruction set of the embedded engine's compiled path on a CPU; auto takes the fastest that the processor has.
    Those with vnni, avx512_bf16 and amx multiply quantised weights faster, mostly by activations of 8 bits instead of
    16. avx512_bf16 and amx round what bfloat16 weights are multiplied with to bfloat16, and keep keys and values in it;
    the others, and DTYPE=float32, do not.
    """

    @field_validator("threads", mode="after")
    @classmethod
    def _few_threads(cls, value: int) -> int:
        cores = os.cpu_count() or 1
        if value > (most := max(16, 4 * cores)):
            raise ValueError(f"{value} threads would wait for each other on {cores} cores: at most {most}")
        return value

    @field_validator("quantization", "kv_cache_dtype", "compressed_weights", mode="after")
    @classmethod
    def _embedded_only(cls, value: str, info: ValidationInfo) -> str:
        engine = info.data.get("engine", "embedded")
        if value in ("fp8", "int8", "on") and engine != "embedded":
            more = "; TensorRT-LLM's own are arguments (EXTRA_ENGINE_ARGS)" if engine == "trtllm" else ""
            raise ValueError(f"{value} is for the embedded engine, not for {engine}{more}")
        return value


class BatchSettings(Section):
    """Sizes of steps, of the context and of the KV cache."""

    group = "Batch and KV cache"

    max_seq_len: int = Field(EMBEDDED.max_seq_len, ge=0)
    """Context length in tokens; 0 takes the model's, or what the KV cache of a CPU holds."""
    max_batch_size: int = Field(0, ge=0, le=4096)
    """Maximum number of sequences in one step; 0 fits the GPU or the cores."""
    max_num_tokens: int = Field(0, ge=0)
    """Maximum number of tokens in one step, shared by chunked prefill and decode; 0 fits the GPU. On a CPU the embedded
    engine takes at most 64 tokens of chunked prompts in a step with decodes, and 256 in one without.
    """
    kv_block_size: int = Field(EMBEDDED.kv_block_size, ge=1, le=1024)
    """Number of tokens in a KV block."""
    kv_cache_memory_mb: int = Field(0, ge=0)
    """Memory for KV blocks on a CPU, in MiB; 0 takes what the batch can use, up to a quarter of the free memory."""
    free_gpu_memory_fraction: float = Field(EMBEDDED.free_gpu_memory_fraction, gt=0, le=1)
    """Fraction of the free GPU memory used for KV blocks."""
    enable_block_reuse: bool = EMBEDDED.enable_block_reuse
    """Reuse the KV blocks of equal prefixes."""
    enable_chunked_prefill: bool = EMBEDDED.enable_chunked_prefill
    """Split long prompts over several steps."""
    kv_host_cache_mb: int = Field(EMBEDDED.kv_host_cache_mb, ge=0)
    """Host memory for KV blocks that the device has no room for, in MiB; 0 is off. TensorRT-LLM's host_cache_size."""
    kv_disk_cache_mb: int = Field(EMBEDDED.kv_disk_cache_mb, ge=0)
    """Disk space for KV blocks that the host has no room for, in MiB, for all models in KV_DISK_CACHE_DIR; 0 is off.
    Needs KV_HOST_CACHE_MB, and the embedded engine.
    """
    kv_disk_cache_dir: ExpandedPath = Path("~/.cache/trellis/kv")
    """Folder for KV blocks on disk, which replicas of a host may share. They stay after the server has ended."""
    kv_offload_min_requests: int = Field(EMBEDDED.kv_offload_min_requests, ge=1)
    """Number of requests that have to ask for a KV block before the host, and the disk, keep it."""

    @field_validator("kv_disk_cache_mb", mode="after")
    @classmethod
    def _below_the_host(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("kv_host_cache_mb"):
            raise ValueError("blocks reach the disk by way of the host: set KV_HOST_CACHE_MB too")
        if value and (engine := info.data.get("engine", "embedded")) != "embedded":
            raise ValueError(f"the disk tier is the embedded engine's, not {engine}'s")
        return value

    @field_validator("kv_host_cache_mb", mode="after")
    @classmethod
    def _needs_reuse(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("enable_block_reuse", True):
            raise ValueError("blocks are kept for reuse: leave it 0, or ENABLE_BLOCK_REUSE on")
        return value


class SleepSettings(Section):
    """Settings of sleep after idle time. ADMIN_KEY lets an operator put replicas to sleep."""

    group = "Sleep"

    sleep_after_idle_seconds: float = Field(SleepConfig().idle_seconds, ge=0)
    """Seconds without a request after which the engine releases the memory of weights and KV cache, or an encode
    replica that of its encoder; 0 is never."""
    sleep_level: int = Field(SleepConfig().idle_level, ge=1, le=2)
    """Depth of an idle engine's sleep: 1 keeps the weights in host memory, 2 reads them from the model's files
    again."""
    wake_on_demand: bool = SleepConfig().wake_on_demand
    """Have a request wake an engine that fell asleep by itself, and wait for it; false answers 503 until /wake_up."""

    @field_validator("sleep_after_idle_seconds", mode="after")
    @classmethod
    def _has_an_engine(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("disaggregation_mode") == "router":
            raise ValueError("the role router has no engine that could sleep")
        return value


class SpeculationSettings(Section):
    """Speculative decoding: tokens that are likely to come next are checked in one step. No output depends on it."""

    group = "Speculative decoding"

    speculative: Literal["none", "ngram", "suffix", "draft", "eagle3"] = EMBEDDED.speculative
    """Method of speculative decoding: ngram looks for the end of the text in prompt, output and prediction; suffix also
    in earlier answers; draft is a small model and eagle3 an EAGLE-3 head (SPECULATIVE_MODEL). TensorRT-LLM has ngram
    and draft of its own.
    """
    speculative_model: str = EMBEDDED.speculative_model
    """Draft model, with the tokenizer of MODEL, or EAGLE-3 head that was trained for MODEL: Hugging Face folder or id.
    smollm2-135m-instruct and qwen2.5-coder-0.5b have heads that come with this server.
    """
    speculative_tokens: int = Field(EMBEDDED.speculative_tokens, ge=1, le=64)
    """Maximum number of proposed tokens of a sequence in one step."""
    speculative_min_match: int = Field(EMBEDDED.speculative_min_match, ge=1, le=16)
    """Tokens that have to be found again before what followed them is proposed: by ngram and suffix, and beside draft
    and eagle3.
    """
    speculative_answer_tokens: int = Field(EMBEDDED.speculative_answer_tokens, ge=1024, le=1 << 20)
    """Tokens of earlier answers that suffix keeps, about 0.5 kB each."""
    speculative_min_speedup: float = Field(EMBEDDED.speculative_min_speedup, ge=0, le=10)
    """Expected speed-up of a step from which on proposals are checked, by measured acceptance and times of steps; 0
    checks all of them.
    """

    @field_validator("speculative", mode="after")
    @classmethod
    def _can_speculate(cls, value: str, info: ValidationInfo) -> str:
        engine = info.data.get("engine", "embedded")
        if value != "none" and engine == "fake":
            raise ValueError("the fake engine does not speculate")
        if value in ("suffix", "eagle3") and engine == "trtllm":
            raise ValueError(
                "is not for TensorRT-LLM: take ngram or draft, or its own kinds by speculative_config"
                " (EXTRA_ENGINE_ARGS)"
            )
        return value

    @field_validator("speculative_model", mode="after")
    @classmethod
    def _drafts(cls, value: str, info: ValidationInfo) -> str:
        kind = info.data.get("speculative")
        if kind == "draft" and not value:
            raise ValueError("SPECULATIVE=draft needs a draft model")
        if kind == "eagle3" and not value and (model := info.data.get("model")) not in HEADS:
            raise ValueError(
                f"SPECULATIVE=eagle3 needs an EAGLE-3 head for {model}; {' and '.join(HEADS)} come with one"
            )
        if value and kind not in ("draft", "eagle3"):
            raise ValueError("is for SPECULATIVE=draft and SPECULATIVE=eagle3")
        return value


class TrtllmSettings(Section):
    """Settings of TensorRT-LLM."""

    group = "TensorRT-LLM"

    backend: Literal["pytorch", "_autodeploy"] = TrtllmConfig(model="").backend
    """Backend inside TensorRT-LLM."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs that share each layer."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Number of pipeline stages, each on GPUs of its own."""
    expert_parallel_size: int = Field(0, ge=0)
    """Number of GPUs that share the experts of a mixture of experts; 0 lets the engine choose."""
    enable_attention_dp: bool = False
    """Run attention data-parallel over the GPUs of the tensor-parallel group."""
    gpus_per_node: int = Field(0, ge=0)
    """Number of GPUs in a node; 0 takes the visible ones."""
    guided_decoding_backend: Literal["auto", "xgrammar", "llguidance", "none"] = "auto"
    """Library for structured output; auto takes xgrammar where tokenizer and speculation can have it, none refuses
    structured output.
    """
    trtllm_sampling: Literal["native", "processors"] = TrtllmConfig(model="").sampling
    """Sampling parameters that TensorRT-LLM's sampler ignores (penalties, seed, min_p ...): native refuses them,
    processors computes them in logits processors, which need the overlap scheduler off and so cost throughput.
    """
    secondary_offload_min_priority: int = Field(-1, ge=-1, le=100)
    """Lowest priority of KV blocks that are copied to the host (KV_HOST_CACHE_MB) before they are evicted; -1 takes
    TensorRT-LLM's default. Requests of this server have its default priority, 35.
    """
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    engine_hang_seconds: float = Field(TrtllmConfig(model="").hang_seconds, ge=0)
    """Seconds for which the engine may owe tokens, or a step of pictures, without making progress, or its process may
    not respond, before it is killed and restarted, 10 at least; 0 is without limit.
    """
    publish_kv_events: bool = Field(
        False, validation_alias=AliasChoices("publish_kv_events", "publish_events_and_metrics")
    )
    """Publish KV-cache events for routers."""
    extra_engine_args: PathOrNone = None
    """YAML file with arguments of TensorRT-LLM's LLM; they override the settings."""
    override_engine_args: str = ""
    """JSON object with arguments of TensorRT-LLM's LLM; they override EXTRA_ENGINE_ARGS."""

    @field_validator("engine_hang_seconds", mode="after")
    @classmethod
    def _longer_than_beats(cls, value: float) -> float:
        if 0 < value < _LEAST_HANG_SECONDS:
            raise ValueError(f"an engine shows that it lives once a second: at least {_LEAST_HANG_SECONDS:g}, or 0")
        return value


class SettingsForTests(Section):
    """Settings for tests."""

    group = "Tests"

    fake_token_delay_ms: float = Field(0.0, ge=0)
    """Pause between two tokens of the fake engine, in milliseconds."""
    fake_script: PathOrNone = None
    """JSON file with a list of texts: the fake engine's answers, which requests get in turn."""
    enable_test_logits_processor: bool = Field(
        False, validation_alias=AliasChoices("enable_test_logits_processor", "dyn_enable_test_logits_processor")
    )
    """Answer every request with Hello world!, by a logits processor in the engine, to test that processors work."""

    @field_validator("enable_test_logits_processor", mode="after")
    @classmethod
    def _has_logits(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("engine") == "fake":
            raise ValueError("the fake engine has no logits")
        return value
