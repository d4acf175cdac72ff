"""Default sizes, chosen to fit the machine: batch, step, KV cache, context, API processes.

This module does not import torch, so that `config` and `doctor` answer at once. TensorRT-LLM chooses these by itself;
only the embedded engine needs them.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.checkpoints.packaged import PACKAGED
from engine.checkpoints.whisper import WhisperSizes
from engine.embedded.threads import compute_threads
from engine.errors import EngineFailure
from engine.kit.machine import free_memory, host_memory
from engine.process.wire import Standby
from server.process.gpus import Gpu, driver_is_loaded, hides_all, nvidia_smi, parse_gpus, visible
from server.roles import role_of
from server.settings import Settings
from server.settings.environment import visible_devices

GIB = 1 << 30
MIB = 1 << 20
_GPU_SIZES = ((40 * GIB, 256, 4096), (20 * GIB, 128, 4096), (0, 64, 2048))
"""Size of the batch, and number of prompt tokens in a step, by the least memory of a GPU. On an H200, 8,192 tokens are
one percent more efficient and take twice as long, in which all others wait (docs/log.md)."""
_SEQUENCES_PER_CORE, _LEAST_BATCH, _MOST_BATCH = 16, 16, 256
_CPU_STEP = 1024
_UNKNOWN_KV = 384
"""MiB for the KV cache of a model whose layers may differ."""
_LEAST_KV = 64
_CORES_PER_API_PROCESS, _MOST_API_PROCESSES = 4, 4
"""One API process sends about 24,000 tokens a second at most, and tokens are late long before that. An H200 makes 7,500
with an 8B model at 64 streams, 15,000 in FP8 at 256, and more with smaller models (docs/log.md).
"""

_STANDBY_ROOM = GIB
"""Free memory that a standby process needs which nobody asked for: it takes a sixth of it."""


@dataclass(frozen=True)
class Machine:
    """Facts on which sizes depend. `memory` and `free` are the host's, in bytes."""

    gpus: tuple[Gpu, ...] | None = ()
    """GPUs that CUDA_VISIBLE_DEVICES shows; None if nvidia-smi did not answer."""
    hidden: int = 0
    """Number of GPUs that it does not show."""
    torch: str = ""
    """Version of torch; empty if it is not installed."""
    driver: bool = False
    """Whether NVIDIA's driver is loaded."""
    cores: int = field(default_factory=compute_threads)
    memory: int = field(default_factory=host_memory)
    free: int = field(default_factory=free_memory)

    @property
    def has_cuda(self) -> bool:
        """Whether torch would find a GPU, as far as known."""
        return (self.driver if self.gpus is None else bool(self.gpus)) and not self.torch.endswith("+cpu")


class Size(NamedTuple):
    """A size, and why it is so."""

    value: int
    why: str


class ChosenValue(NamedTuple):
    """A value of a setting, and why it is chosen."""

    value: str
    why: str


@cache
def this_machine() -> Machine:
    """Return the facts of this machine, looked up once."""
    return survey()


def survey() -> Machine:
    """Look up the facts of this machine."""
    answer, devices = nvidia_smi(), visible_devices()
    present = parse_gpus(answer)
    gpus = visible(present, devices) if answer is not None or hides_all(devices) else None
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return Machine(gpus, len(present) - len(gpus or ()), torch, driver_is_loaded())


def on_gpu(settings: Settings, machine: Machine) -> bool:
    """Return whether the embedded engine computes on a GPU."""
    return machine.has_cuda if settings.device == "auto" else settings.device.startswith("cuda")


def sizes(settings: Settings, folder: Path | None, machine: Machine) -> dict[str, Size]:
    """Return the sizes of the embedded engine that the settings leave open, as far as they are known without the
    model's folder.
    """
    chosen = _on_gpu(settings, machine) if on_gpu(settings, machine) else _on_cpu(settings, folder, machine)
    if settings.device == "auto" and machine.gpus is None:  # the engine may have to fall back to the CPU
        chosen["kv_cache_memory_mb"] = _on_cpu(settings, folder, machine)["kv_cache_memory_mb"]
    return {name: choice for name, choice in chosen.items() if not getattr(settings, name)}


def explained(settings: Settings, folder: Path | None, machine: Machine) -> dict[str, Size]:
    """Return `sizes`, and those that the engine finds by itself, for people."""
    chosen, facts = sizes(settings, folder, machine), _facts(folder)
    if facts is not None and not settings.max_seq_len:
        chosen.setdefault("max_seq_len", Size(facts.context_length, "the model's own"))
    if on_gpu(settings, machine):
        rest = Size(0, "FREE_GPU_MEMORY_FRACTION of the memory that the weights leave")
        chosen.setdefault("kv_cache_memory_mb", rest)
    elif not settings.threads:
        chosen["threads"] = Size(machine.cores, "one for each available core")
    return chosen


def embedding_transfer(settings: Settings, machine: Machine) -> ChosenValue | None:
    """Return the way of embeddings between this replica and encode replicas, if there are any: `direct` or `front`."""
    if not (settings.encode_urls or role_of(settings).serves_encodings):
        return None
    if settings.embedding_transfer != "auto":
        return ChosenValue(settings.embedding_transfer, "EMBEDDING_TRANSFER says so")
    if settings.engine != "embedded":
        return ChosenValue("front", f"with ENGINE={settings.engine} none stay with an encoder")
    if on_gpu(settings, machine):
        return ChosenValue("direct", "by CUDA IPC on this host")
    return ChosenValue("front", "the embeddings are in the host's memory")


def standby(settings: Settings, machine: Machine) -> tuple[Standby, int]:
    """Return the preparation of a second engine process, and the bytes that must be free for it. Unless the settings
    say something else, there is one on a CPU, where imports are most of a start.
    """
    auto = settings.engine_standby == "auto" and settings.engine == "embedded"
    if settings.standby or not auto or settings.engine_on_death == "exit" or on_gpu(settings, machine):
        return settings.standby, 0
    return "imports", _STANDBY_ROOM


def api_processes(settings: Settings, folder: Path | None, machine: Machine) -> Size:
    """Return the number of API processes that fits the machine. `folder` has at least the model's config.json."""
    role = role_of(settings)
    if not role.has_engine:
        return Size(1, f"the role {role.name} has one")
    if settings.dynamo:
        return Size(1, "a worker of a Dynamo graph has one")
    if not settings.engine_process:
        return Size(1, "the engine runs in it")
    if settings.engine == "fake" or not on_gpu(settings, machine):
        return Size(1, "it keeps up with an engine on a CPU")
    if settings.engine == "embedded" and _has_tower(settings, folder):
        return Size(1, "each would load what encodes the model's media")
    count = min(_MOST_API_PROCESSES, max(1, machine.cores // _CORES_PER_API_PROCESS))
    most = f", {_MOST_API_PROCESSES} at most" if count == _MOST_API_PROCESSES else ""
    return Size(count, f"1 for each {_CORES_PER_API_PROCESS} of {machine.cores} cores beside a GPU{most}")


def _has_tower(settings: Settings, folder: Path | None) -> bool:
    """Return whether something encodes media: all built-in models that are trained on top of another take some."""
    try:
        built_in = PACKAGED.get(settings.model)
        return bool(built_in and built_in.base) or (folder is not None and read_model_facts(folder).takes_media)
    except EngineFailure:
        return False


def _on_gpu(settings: Settings, machine: Machine) -> dict[str, Size]:
    gpus = machine.gpus or ()
    memory = min((gpu.memory for gpu in gpus), default=0)
    batch, prompts = next((batch, prompts) for least, batch, prompts in _GPU_SIZES if memory >= least)
    name = f"{gpus[0].name} with {memory / GIB:.0f} GiB" if gpus else "a GPU of unknown memory"
    batch_set = settings.max_batch_size or batch
    return {
        "max_batch_size": Size(batch, f"for {name}"),
        "max_num_tokens": Size(prompts + batch_set, f"{prompts} tokens of prompts for {name}, and the batch"),
    }


def _on_cpu(settings: Settings, folder: Path | None, machine: Machine) -> dict[str, Size]:
    batch = min(_MOST_BATCH, max(_LEAST_BATCH, _SEQUENCES_PER_CORE * machine.cores))
    chosen = {
        "max_batch_size": Size(batch, f"{_SEQUENCES_PER_CORE} for each of {machine.cores} cores"),
        "max_num_tokens": Size(_CPU_STEP, "room for the batch; of prompts a CPU's step takes 64 to 256 tokens"),
    }
    facts = _facts(folder)
    if facts is None:
        return chosen | {"kv_cache_memory_mb": Size(_UNKNOWN_KV, "until the model is known")}
    if facts.family.transcribes:
        sizes = WhisperSizes.of(facts)
        needed = -(-(settings.max_batch_size or batch) * sizes.place_bytes(_value_bytes(settings)) // MIB)
        given = machine.free // 4 // MIB
        why = "all that the batch can use" if needed <= given else f"1/4 of {machine.free / GIB:.1f} GiB of free memory"
        return chosen | {"kv_cache_memory_mb": Size(max(_LEAST_KV, min(needed, given)), why)}
    token_bytes = kv_bytes(settings, facts)
    if not token_bytes:
        return chosen | {"kv_cache_memory_mb": Size(_UNKNOWN_KV, "the model's layers differ")}
    share = 8 if role_of(settings).moves_kv_blocks else 4
    given = machine.free // share // MIB
    context = settings.max_seq_len or facts.context_length
    needed = -(-(settings.max_batch_size or batch) * context * token_bytes // MIB)
    if given < needed:
        cache = Size(max(_LEAST_KV, given), f"1/{share} of {machine.free / GIB:.1f} GiB of free memory")
    else:
        cache = Size(max(1, needed), "all that the batch can use at full context")
    chosen["kv_cache_memory_mb"] = cache
    room = (settings.kv_cache_memory_mb or cache.value) * MIB // token_bytes
    if room < facts.context_length:
        block = settings.kv_block_size
        tokens = max(block, room // block * block)
        chosen["max_seq_len"] = Size(tokens, f"the KV cache holds no more of the model's {facts.context_length}")
    return chosen


def kv_bytes(settings: Settings, facts: ModelFacts) -> int:
    """Return the bytes of a token's keys and values, on a CPU those of float32, of which some levels of `CPU_ISA` need
    half; 0 where layers attend to a window, or sizes are missing."""
    if set(facts.text.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        return 0
    if facts.text.get("sliding_window") and facts.text.get("use_sliding_window", True):
        return 0
    try:
        return facts.layers * 2 * facts.kv_heads * facts.head_dim * _value_bytes(settings)
    except EngineFailure:
        return 0


def _value_bytes(settings: Settings) -> int:
    return 2 if settings.dtype in ("bfloat16", "float16") else 4


def _facts(folder: Path | None) -> ModelFacts | None:
    """Return the facts of a model whose context length is known; the engine reports what is wrong."""
    try:
        facts = read_model_facts(folder) if folder is not None else None
        return facts if facts is not None and facts.context_length else None
    except EngineFailure:
        return None
