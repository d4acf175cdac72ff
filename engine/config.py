"""Configuration of each backend. Data only: `engine/create.py` makes engines of it."""

from typing import Any, ClassVar, Literal, Protocol

import msgspec

from engine.kit.processors import ProcessorConfig
from engine.media import FrameSampling

MAX_AUDIO_SECONDS = 600.0
"""Default limit for the length of a recording."""
MAX_IMAGE_PIXELS = 64_000_000
"""Default limit for the size of an image, width times height, of all its frames."""

CpuIsa = Literal["auto", "portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
"""`auto`, or a level of `engine/embedded/models/native/levels.py`."""


Tag = Literal["weights", "kv_cache"]
"""Memory that a sleeping engine gives back."""


class SleepConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of sleep (`engine/sleep.py`)."""

    idle_seconds: float = 0.0
    """Seconds without a request after which the engine falls asleep by itself; 0 is never."""
    idle_level: Literal[1, 2] = 1
    wake_on_demand: bool = True
    """Whether a request wakes an engine that fell asleep by itself."""


class VideoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of videos, and the default choice of frames."""

    max_seconds: float = 600.0
    """Seconds of a video, by its number of frames."""
    max_pixels: int = 1 << 23
    """Pixels of a frame; 4K has fewer."""
    max_frames: int = 64
    """Maximum number of frames that are taken of a video."""
    decode_seconds: float = 30.0
    """Seconds that decoding a video may take."""
    sampling: FrameSampling = FrameSampling()
    """Default choice of frames, which overrides the model's own; zeros leave it to the model."""


class _BackendConfig(msgspec.Struct, frozen=True, kw_only=True):
    sleep: SleepConfig | None = None
    """Configuration of sleep; None for an engine that never sleeps."""
    extra_stop_seconds: ClassVar[float] = 0.0
    """Seconds that this engine may take to stop, beyond those of other engines."""
    hang_seconds: float = 0.0
    """Seconds for which the event loop of the engine's process may be blocked before it is killed; 0 is no limit."""


class FakeConfig(_BackendConfig, frozen=True, kw_only=True, tag="fake"):
    """The deterministic engine without a model. `token_delay` is in seconds. `script` has the tokens of its answers,
    which requests get in turn, whatever they ask for; without a script it echoes the prompt.
    """

    model: str = "fake"
    vocab_size: int = 512
    eos_token_ids: tuple[int, ...] = (2,)
    context_length: int = 32768
    block_size: int = 32
    num_blocks: int = 65536
    max_num_seqs: int = 1024
    token_delay: float = 0.0
    script: tuple[tuple[int, ...], ...] = ()


class _ModelConfig(_BackendConfig, frozen=True, kw_only=True):
    """Options for running a model, or its vision tower, with PyTorch. Each field means the same as the setting of its
    name."""

    model: str
    """Folder with config.json, safetensors and tokenizer.json; for a vision tower also the configuration of its image
    processor.
    """
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    threads: int = 0


class EmbeddedConfig(_ModelConfig, frozen=True, kw_only=True, tag="embedded"):
    """The PyTorch engine. 0 takes the default that the setting of the same name documents
    (`server/settings/engine.py`).
    """

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
    overlap_scheduler: str = "auto"
    enable_cuda_graphs: bool = True
    compressed_weights: Literal["auto", "on", "off"] = "auto"
    cpu_isa: CpuIsa = "auto"
    """Instruction set of the compiled path on a CPU."""
    kv_host_cache_mb: int = 0
    kv_disk_cache_mb: int = 0
    kv_disk_cache_dir: str = ""
    kv_offload_min_requests: int = 1
    speculative: Literal["none", "ngram", "suffix", "draft", "eagle3"] = "none"
    speculative_model: str = ""
    """Folder of the draft model, or of the EAGLE-3 head."""
    speculative_tokens: int = 16
    """Maximum number of drafted tokens of a sequence in a step."""
    speculative_min_match: int = 2
    """Number of tokens that must match before the tokens after the match are drafted."""
    speculative_answer_tokens: int = 32768
    """Tokens of answers that `suffix` keeps."""
    speculative_min_speedup: float = 1.1
    """Expected speed-up of a step from which on drafts are computed; 0 computes all of them."""
    guide_timeout_seconds: float = 15.0
    guide_workers: int = 2
    """Processes that compile grammars, for each library."""
    kv_transfer: Literal["", "auto", "shared_memory", "cuda_ipc", "nixl", "tcp"] = ""
    """Transport of KV blocks between replicas; empty for none."""
    kv_transfer_port: int = 0
    """TCP port on which KV blocks are served; 0 takes a free one."""
    embedding_memory_mb: int = 256
    """Memory of the host into which embeddings are read that stay with their encoder."""
    transfer_timeout_seconds: float = 5.0
    """Seconds that reading a prompt's KV blocks may take before the prompt is computed here."""
    kv_memory_later: bool = False
    """Whether to reserve only addresses for KV blocks on a GPU until the engine starts, because another engine has the
    memory until then."""
    memory_service: str = ""
    """Socket of the memory service that owns the weights; empty for weights of this engine's own."""
    cache_dir: str = ""
    """Folder for code that is compiled for this machine; empty takes the settings' default."""
    processors: tuple[ProcessorConfig, ...] = ()
    """Logits processors that requests may name."""

    @property
    def head_folder(self) -> str:
        """Folder of the EAGLE-3 head; empty without one."""
        return self.speculative_model if self.speculative == "eagle3" else ""


class EncoderConfig(_ModelConfig, frozen=True, kw_only=True):
    """The tower of the embedded engine, which encodes images or audio."""

    max_image_pixels: int = MAX_IMAGE_PIXELS
    processor_options: dict[str, Any] = {}
    """Overrides of the configuration of the model's image processor, by the processor's own names."""
    videos: VideoOptions = VideoOptions()
    max_audio_seconds: float = MAX_AUDIO_SECONDS
    keep: Literal["auto", "direct", "front"] = "front"
    """Whether embeddings may stay on the device until engines have read them; with `auto`, on a GPU."""
    keep_mb: int = 256
    """Memory of the device for them."""
    keep_from: int = 0
    """Bytes from which embeddings of an image stay."""
    keep_seconds: float = 0.0
    """Seconds for which they are leased to their first readers, unless these release them."""
    timeout_seconds: float = 60.0
    """Seconds that an image, or on a GPU a small batch, may take before the process that encodes them is replaced."""


class _FastPathOptions(Protocol):
    @property
    def quantization(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def compressed_weights(self) -> str: ...


def fast_path_settings(options: _FastPathOptions) -> str:
    """Return the settings that ask for what only the embedded engine's fast path on a GPU has, as they are set; empty
    if none does."""
    asked = {
        "QUANTIZATION=fp8": options.quantization == "fp8",
        "KV_CACHE_DTYPE=fp8": options.kv_cache_dtype == "fp8",
        "COMPRESSED_WEIGHTS=on": options.compressed_weights == "on",
    }
    return " and ".join(name for name, is_set in asked.items() if is_set)


class TrtllmConfig(_BackendConfig, frozen=True, kw_only=True, tag="trtllm"):
    """TensorRT-LLM. `arguments` are those of its `LLM`, merged and checked (`engine/trtllm/arguments.py`)."""

    model: str
    """Folder with config.json, weights and tokenizer."""
    backend: Literal["pytorch", "_autodeploy"] = "pytorch"
    max_image_pixels: int = MAX_IMAGE_PIXELS
    videos: VideoOptions = VideoOptions()
    max_audio_seconds: float = MAX_AUDIO_SECONDS
    arguments: dict[str, Any] = {}
    sampling: Literal["native", "processors"] = "native"
    """Whether our logits processors apply parameters that the engine's sampler ignores (`engine/trtllm/support.py`)."""
    processors: tuple[ProcessorConfig, ...] = ()
    """Logits processors that requests may name."""
    hang_seconds: float = 360.0
    """Seconds for which the event loop may be blocked, or the engine make no progress, before the process is killed: a
    minute longer than the timeout of TensorRT-LLM's own hang detector, which reports where it hangs."""

    extra_stop_seconds: ClassVar[float] = 10.0
    """Additional seconds to stop, in which its worker processes end."""


class TrtllmEncoderConfig(TrtllmConfig, frozen=True, kw_only=True, tag="trtllm_encoder"):
    """TensorRT-LLM's encoder alone. `arguments` are those of its `MultimodalEncoder`."""


EngineConfig = FakeConfig | EmbeddedConfig | TrtllmConfig
