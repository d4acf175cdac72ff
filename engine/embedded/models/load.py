"""The choice of a model runner for a configuration. transformers is slow to import, so only runners that need it
import it."""

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path

from engine.checkpoints.conversions import source_of
from engine.config import EmbeddedConfig, Tag, fast_path_settings
from engine.embedded.kv.memory import check_fits
from engine.embedded.models.devices import UnsupportedModelError, device_of, dtype_of
from engine.embedded.models.native.levels import chosen
from engine.embedded.models.runner import ModelRunner, StepInput
from engine.embedded.models.shared_weights import SharedWeights
from engine.errors import EngineFailure
from engine.kit.collector import uncollected

log = logging.getLogger(__name__)

_loading = threading.Lock()
"""transformers replaces functions of torch while it loads: two models at once would leave them replaced."""


def load_runner(config: EmbeddedConfig) -> ModelRunner:
    """Load a model into the runner that is best for the device, or that `attention` names, and try it; one at a time.
    Raises EngineFailure."""
    with _loading:
        try:
            runner = _load(config)
        except (OSError, MemoryError) as error:
            asked = f"KV_CACHE_MEMORY_MB={config.kv_cache_memory_mb}"
            raise EngineFailure(f"the model in {config.model} cannot be loaded with {asked}: {error}") from error
        if config.load_format != "dummy":
            _try_out(runner, config)
        return runner


def import_runner(config: EmbeddedConfig) -> None:
    """Import the runner that `load_runner` tries first. A device gets no context."""
    kind = "cuda" if device_of(config).type == "cuda" else "native"
    with contextlib.suppress(ImportError), uncollected():  # `load_runner` says so, or takes another
        import_module(f"engine.embedded.models.{'torch' if config.attention == 'sdpa' else kind}.runner")


def state_of_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of the files that weights are read from: others must not be taken for them."""
    source = source_of(folder)
    files = [*folder.glob("*.safetensors"), *folder.glob("*.json"), *([] if source is None else [source])]
    return {path: ((found := path.stat()).st_size, found.st_mtime_ns) for path in files}


def resume_memory(runner: ModelRunner, tags: Collection[Tag]) -> None:
    """Have a runner take released memory again, and load its weights, one at a time. Raises EngineFailure."""
    with _loading:
        try:
            runner.resume_memory(tags)
        except (OSError, MemoryError, UnsupportedModelError, RuntimeError) as error:
            raise EngineFailure(f"the model cannot be loaded again: {error}") from error


def forecast(config: EmbeddedConfig) -> Iterator[tuple[str, str]]:
    """Yield what `load_runner` would compute with, as name and value, as far as that is known before weights are
    read. Raises EngineFailure."""
    levels, device = chosen(config.cpu_isa, config.dtype), device_of(config)
    yield "device", str(device)
    if device.type == "cuda":
        yield "dtype", str(dtype_of(config, device)).removeprefix("torch.")
        yield (
            "compute_path",
            "transformers" if config.attention == "sdpa" else "cuda, or transformers where the model has no fast path",
        )
        return
    from engine.embedded.models.native.build import first_compiled  # noqa: PLC0415
    from engine.embedded.models.native.runner import NativeRunner, check, code_folder  # noqa: PLC0415

    try:
        if config.attention != "auto":
            raise UnsupportedModelError(f"attention is {config.attention}")
        certain = check(config)
    except UnsupportedModelError as error:
        if config.quantization == "int8":
            raise EngineFailure(f"QUANTIZATION=int8 cannot be used: {error}") from error
        yield "dtype", str(dtype_of(config, device)).removeprefix("torch.")
        yield "compute_path", f"transformers ({error})"
    else:
        yield "dtype", str(NativeRunner.dtype).removeprefix("torch.")
        yield (
            "compute_path",
            NativeRunner.compute_path + ("" if certain else ", or transformers if bfloat16 would change the weights"),
        )
        yield "instruction_set", first_compiled(code_folder(config), levels).name
        if config.quantization != "none":
            yield "quantization", config.quantization


def _load(config: EmbeddedConfig) -> ModelRunner:
    chosen(config.cpu_isa, config.dtype)  # a setting that cannot be kept stops the start, compiled path or not
    if device_of(config).type == "cuda":
        return _on_gpu(config)
    if not config.num_blocks:
        check_fits(config.kv_cache_memory_mb)
    if asked := fast_path_settings(config):
        raise EngineFailure(f"{asked} cannot be used: it needs an NVIDIA GPU of compute capability 9.0 or later")
    if config.attention == "flashinfer":
        raise EngineFailure("attention flashinfer cannot be used: FlashInfer needs a GPU")
    int8 = config.quantization == "int8"
    if int8 and config.attention != "auto":
        raise EngineFailure(f"QUANTIZATION=int8 cannot be used with ATTENTION={config.attention}")
    if config.attention == "auto":
        from engine.embedded.models.native.runner import NativeRunner  # noqa: PLC0415

        try:
            return NativeRunner(config)
        except UnsupportedModelError as error:
            if int8:
                raise EngineFailure(f"QUANTIZATION=int8 cannot be used: {error}") from error
            log.warning("the model is computed by transformers, which is slower: %s", error)
    return _by_transformers(config)


def _by_transformers(config: EmbeddedConfig) -> ModelRunner:
    with uncollected():
        from engine.embedded.models.torch.runner import TorchRunner  # noqa: PLC0415

    runner = TorchRunner(config)
    runner.shared_weights = SharedWeights(config)
    runner.shared_weights.give_up("transformers computes this model")
    return runner


def _on_gpu(config: EmbeddedConfig) -> ModelRunner:
    asked = fast_path_settings(config)
    if config.quantization == "int8":
        raise EngineFailure("QUANTIZATION=int8 cannot be used: it is for a CPU; a GPU takes fp8")
    if config.attention == "sdpa":
        if asked:
            raise EngineFailure(f"{asked} cannot be used with ATTENTION=sdpa")
        return _by_transformers(config)
    try:
        with uncollected():
            from engine.embedded.models.cuda.runner import CudaRunner  # noqa: PLC0415 - needs Triton and FlashInfer

        return CudaRunner(config)
    except (ImportError, UnsupportedModelError) as error:
        if asked:
            raise EngineFailure(f"{asked} cannot be used: {error}") from error
        if config.attention == "flashinfer":
            raise EngineFailure(f"attention flashinfer cannot be used: {error}") from error
        log.warning("attention is torch's own, which is slow on a GPU: %s", error)
    return _by_transformers(config)


def _try_out(runner: ModelRunner, config: EmbeddedConfig) -> None:
    """Compute a few tokens in the first blocks, and leave the blocks empty. Raises EngineFailure unless all logits are
    finite. The weights are, so what is not comes from sizes that the type of activations cannot hold."""
    room = config.kv_block_size * min(group.num_blocks for group in runner.groups)
    tokens = [0, runner.vocab_size // 2, runner.vocab_size - 1][: min(room, runner.context_length)]
    blocks = list(range(-(-len(tokens) // config.kv_block_size)))
    try:
        logits = runner.forward(
            StepInput(
                tokens=tokens,
                positions=list(range(len(tokens))),
                starts=[0],
                lengths=[len(tokens)],
                slots=[0],
                admissions=[0],
                tables=[[blocks] * len(runner.groups)],
                sampled=[0],
                rows=list(range(len(tokens))),
            )
        )
        finite = bool(logits.isfinite().all())
    except (RuntimeError, ValueError) as error:
        raise EngineFailure(f"the model in {config.model} cannot compute a token: {error}") from error
    for cache in runner.memory.blocks:
        cache[: len(blocks)].zero_()
    if not finite:
        raise EngineFailure(
            f"the model in {config.model} computes logits that are not finite in {runner.dtype}: its weights or its "
            "config.json are wrong, or another DTYPE is needed"
        )
