"""The choice of a model runner for a configuration. transformers is slow to import, so only runners that need it
import it."""

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.config import EmbeddedConfig
from engine.embedded.models.devices import UnsupportedModelError, device_of, dtype_of
from engine.embedded.models.native.levels import chosen
from engine.errors import EngineFailure

if TYPE_CHECKING:
    from engine.embedded.models.runner import ModelRunner

log = logging.getLogger(__name__)

_loading = threading.Lock()
"""transformers replaces functions of torch while it loads: two models at once would leave them replaced."""


def load_runner(config: EmbeddedConfig) -> "ModelRunner":
    """Load a model into the runner that is best for the device, or that `attention` names; one at a time. Raises
    EngineFailure."""
    with _loading:
        return _load(config)


def forecast(config: EmbeddedConfig) -> Iterator[tuple[str, str]]:
    """Yield what `load_runner` would compute with, as name and value, as far as that is known before weights are
    read. Raises EngineFailure."""
    level, device = chosen(config.cpu_isa), device_of(config)
    yield "device", str(device)
    if device.type == "cuda":
        yield "dtype", str(dtype_of(config, device)).removeprefix("torch.")
        yield (
            "compute_path",
            "transformers" if config.attention == "sdpa" else "cuda, or transformers where the model has no fast path",
        )
        return
    from engine.embedded.models.native.runner import NativeRunner, check  # noqa: PLC0415

    try:
        if config.attention != "auto":
            raise UnsupportedModelError(f"attention is {config.attention}")
        certain = check(config)
    except UnsupportedModelError as error:
        yield "dtype", str(dtype_of(config, device)).removeprefix("torch.")
        yield "compute_path", f"transformers ({error})"
    else:
        yield "dtype", str(NativeRunner.dtype).removeprefix("torch.")
        yield (
            "compute_path",
            NativeRunner.compute_path + ("" if certain else ", or transformers if bfloat16 would change the weights"),
        )
        yield "instruction_set", level.name


def _load(config: EmbeddedConfig) -> "ModelRunner":
    chosen(config.cpu_isa)  # whether or not the compiled path is taken: a setting that cannot be kept stops the start
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
    """Return the settings that ask for fp8, as they are set; empty if none does. Only the fast path on a GPU has it."""
    asked = {"QUANTIZATION": config.quantization, "KV_CACHE_DTYPE": config.kv_cache_dtype}
    return " and ".join(f"{name}=fp8" for name, value in asked.items() if value == "fp8")
