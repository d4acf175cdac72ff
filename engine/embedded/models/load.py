"""Which of the engine's models a configuration gets. transformers is slow to import, and only imported by those that need it."""

import logging
import threading
from typing import TYPE_CHECKING

import torch

from engine.config import EmbeddedConfig, EncoderConfig
from engine.errors import EngineFailure

if TYPE_CHECKING:
    from engine.embedded.models.runner import ModelRunner

log = logging.getLogger(__name__)

_loading = threading.Lock()
"""transformers replaces functions of torch while it loads: two models at once would leave them replaced."""


class UnsupportedModelError(ValueError):
    """This model, or this machine, has no fast path; the message says why."""


def load_runner(config: EmbeddedConfig) -> "ModelRunner":
    """Load a model into the runner that is best for the device, or that `attention` names; one at a time. Raises EngineFailure."""
    with _loading:
        return _load(config)


def _load(config: EmbeddedConfig) -> "ModelRunner":
    if device_of(config).type == "cuda":
        return _on_gpu(config)
    if asked := _fp8_settings(config):
        raise EngineFailure(f"{asked} cannot be used: it needs an NVIDIA GPU of compute capability 9.0 or later")
    if config.attention == "flashinfer":
        raise EngineFailure("attention flashinfer cannot be used: FlashInfer needs a GPU")
    if config.attention == "auto":
        from engine.embedded.models.native.runner import NativeRunner  # noqa: PLC0415

        try:
            return NativeRunner(config)
        except UnsupportedModelError as error:
            log.warning("the model is computed by transformers, which is slower: %s", error)
    from engine.embedded.models.torch.runner import TorchRunner  # noqa: PLC0415

    return TorchRunner(config)


def _on_gpu(config: EmbeddedConfig) -> "ModelRunner":
    from engine.embedded.models.torch.runner import TorchRunner  # noqa: PLC0415

    asked = _fp8_settings(config)
    if config.attention == "sdpa":
        if asked:
            raise EngineFailure(f"{asked} cannot be used with ATTENTION=sdpa")
        return TorchRunner(config)
    try:
        from engine.embedded.models.cuda.runner import CudaRunner  # noqa: PLC0415 - needs Triton and FlashInfer

        return CudaRunner(config)
    except (ImportError, UnsupportedModelError) as error:
        if asked:
            raise EngineFailure(f"{asked} cannot be used: {error}") from error
        if config.attention == "flashinfer":
            raise EngineFailure(f"attention flashinfer cannot be used: {error}") from error
        log.warning("attention is torch's own, which is slow on a GPU: %s", error)
    return TorchRunner(config)


def _fp8_settings(config: EmbeddedConfig) -> str:
    """Those that ask for fp8, as they are set; empty for none. Only the fast path on a GPU has it."""
    asked = {"QUANTIZATION": config.quantization, "KV_CACHE_DTYPE": config.kv_cache_dtype}
    return " and ".join(f"{name}=fp8" for name, value in asked.items() if value == "fp8")


def device_of(config: EmbeddedConfig | EncoderConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def dtype_of(config: EmbeddedConfig | EncoderConfig, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16, but float32 on CPUs that have no bfloat16 instructions and would be slower with it."""
    if config.dtype == "auto":
        fast = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
