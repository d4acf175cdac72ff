"""What each backend is told, and the one place that turns it into an engine. Nothing heavy is imported before it is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engine.kit.processors import ProcessorConfig, register_all

if TYPE_CHECKING:
    from engine.base import Engine


class FakeConfig(msgspec.Struct, frozen=True, kw_only=True, tag="fake"):
    """The deterministic engine without a model. `token_delay` is in seconds."""

    model: str = "fake"
    vocab_size: int = 512
    eos_token_ids: tuple[int, ...] = (2,)
    context_length: int = 32768
    block_size: int = 32
    num_blocks: int = 65536
    max_num_seqs: int = 1024
    token_delay: float = 0.0


class EmbeddedConfig(msgspec.Struct, frozen=True, kw_only=True, tag="embedded"):
    """The PyTorch engine. The fields mean what the settings of the same name say (`server/settings/replica.py`); 0 takes the default there."""

    model: str
    """Folder with config.json, safetensors and tokenizer.json."""
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    max_seq_len: int = 0
    max_batch_size: int = 32
    max_num_tokens: int = 1024
    kv_block_size: int = 32
    kv_cache_memory_mb: int = 384
    num_blocks: int = 0
    """KV blocks; 0 sizes them from the memory."""
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True
    enable_chunked_prefill: bool = True
    attention: str = "auto"
    load_format: str = "auto"
    overlap_scheduler: str = "auto"
    enable_cuda_graphs: bool = True
    threads: int = 0
    cpu_isa: Literal["auto", "portable", "avx2", "avx512"] = "auto"
    """Instruction set of the compiled path on a CPU."""
    guide_timeout_seconds: float = 15.0
    kv_transfer: Literal["", "auto", "shared_memory", "cuda_ipc", "nixl", "tcp"] = ""
    """How KV blocks move between replicas; empty for not at all."""
    kv_transfer_port: int = 0
    """On which KV blocks are served by TCP; 0 takes a free one."""
    transfer_timeout_seconds: float = 5.0
    """How long reading a prompt's KV blocks may take before the prompt is computed here."""
    cache_dir: str = ""
    """Folder for code that is compiled for this machine; empty takes the settings' default."""
    processors: tuple[ProcessorConfig, ...] = ()
    """Logits processors that requests may name."""


class TrtllmConfig(msgspec.Struct, frozen=True, kw_only=True, tag="trtllm"):
    """TensorRT-LLM. `arguments` are those of its `LLM`, effective and checked (`engine/trtllm/arguments.py`)."""

    model: str
    """Folder with config.json, weights and tokenizer."""
    backend: Literal["pytorch", "_autodeploy"] = "pytorch"
    role: Literal["aggregated", "prefill", "decode", "encode"] = "aggregated"
    max_image_pixels: int = 64_000_000
    arguments: dict[str, Any] = {}
    processors: tuple[ProcessorConfig, ...] = ()
    """Logits processors that requests may name."""


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The vision tower of the embedded engine. Fields that `EmbeddedConfig` has too mean the same."""

    model: str
    """Folder with config.json, safetensors, tokenizer.json and the configuration of the image processor."""
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    threads: int = 0
    max_image_pixels: int = 64_000_000
    processor_options: dict[str, Any] = {}
    """Over the configuration of the model's image processor, by its own names."""
    timeout_seconds: float = 60.0
    """How long an image, or on a GPU a few together, may take before the process that encodes them is replaced."""


EngineConfig = FakeConfig | EmbeddedConfig | TrtllmConfig


def more_stop_seconds(config: EngineConfig) -> float:
    """How much longer than others this engine may take to stop: TensorRT-LLM has worker processes to end."""
    return 10.0 if isinstance(config, TrtllmConfig) else 0.0


def create_engine(config: EngineConfig) -> Engine:
    """The engine for `config`, not yet started."""
    if isinstance(config, FakeConfig):
        from engine.fake.engine import FakeEngine  # noqa: PLC0415

        return FakeEngine(config)
    register_all(config.processors)
    if isinstance(config, TrtllmConfig) and config.role == "encode":
        from engine.trtllm.encoding_engine import EncodingEngine  # noqa: PLC0415

        return EncodingEngine(config)
    if isinstance(config, TrtllmConfig):
        from engine.trtllm.engine import TrtllmEngine  # noqa: PLC0415

        return TrtllmEngine(config)
    from engine.embedded.engine import EmbeddedEngine  # noqa: PLC0415

    return EmbeddedEngine(config)
