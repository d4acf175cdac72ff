"""Devices and data types that models are computed with."""

from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from engine.config import EmbeddedConfig, EncoderConfig
from engine.errors import EngineFailure


class UnsupportedModelError(ValueError):
    """No fast path exists for this model or machine; the message gives the reason."""


def device_of(config: EmbeddedConfig | EncoderConfig) -> torch.device:
    """Return the configured device; `auto` is a CUDA device if there is one. Raises EngineFailure if it is absent."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise EngineFailure(f"DEVICE={config.device} is not a PyTorch device, such as cpu, cuda or cuda:1") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineFailure(
            f"DEVICE={config.device}, but PyTorch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def dtype_of(config: EmbeddedConfig | EncoderConfig, device: torch.device) -> torch.dtype:
    """Return the type of weights and activations: `auto` is float32 on every CPU, and bfloat16 on a GPU.

    With `auto`, torch's code does not compute in bfloat16 on CPUs that have instructions for it: its answers would
    depend on the processor. `DTYPE=bfloat16` asks for it. Compiled code chooses for itself (`native/levels.py`).
    """
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def cache_dtype_of(config: EmbeddedConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of keys and values of a model with weights of this type."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers, a list or a NumPy array, as a tensor on the device. Pinned memory keeps the copy from waiting for
    what the device does."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def code_digest(folder: Path) -> str:
    """Return a hash of the sources in a runner's folder: other code may round and lay weights out in another way."""
    sources = (path for path in sorted(folder.iterdir()) if path.suffix in (".py", ".cpp", ".h"))
    return blake3(repr([(path.name, path.read_bytes()) for path in sources]).encode()).hexdigest(8)
