"""Devices and data types that models are computed with."""

import torch

from engine.config import EmbeddedConfig, EncoderConfig


class UnsupportedModelError(ValueError):
    """This model, or this machine, has no fast path; the message says why."""


def device_of(config: EmbeddedConfig | EncoderConfig) -> torch.device:
    """Return the configured device; `auto` is a CUDA device if there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def dtype_of(config: EmbeddedConfig | EncoderConfig, device: torch.device) -> torch.dtype:
    """Return the type of weights and activations: `auto` is float32 on every CPU, and bfloat16 on a GPU.

    CPUs with bfloat16 instructions would compute prompts faster in bfloat16, but then answers, the bytes of a KV block
    and the replicas that can share blocks would depend on the processor. `DTYPE=bfloat16` asks for it.
    """
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype
