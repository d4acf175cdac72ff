"""Checks for settings that cannot work on this machine or with this model. `serve` refuses them before it loads
anything, `doctor` lists them.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.checkpoints.store import weight_bytes
from engine.config import fast_path_settings
from engine.errors import EngineFailure
from server.compose.sizing import GIB, MIB, Machine, on_gpu
from server.roles import role_of
from server.settings import Settings

_FAST_PATH_CAPABILITY = 9.0
_TORCH = (
    "pip install 'trellis[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu, or with an NVIDIA GPU "
    "pip install 'trellis[embedded,gpu]'"
)


@dataclass(frozen=True)
class Finding:
    """The result of a check. A problem keeps the server from starting or breaks it under load; a warning may do so."""

    level: Literal["ok", "warning", "problem"]
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}" + (f". Cure: {self.cure}" if self.cure else "")


def impossible(settings: Settings, machine: Machine, folder: Path | None) -> Iterator[Finding]:
    """Yield the problems that keep the embedded engine from starting. `folder` is the model's, if it is present
    already."""
    if settings.engine != "embedded" or not role_of(settings).has_model or settings.engine_address:
        return
    if settings.chat_template is not None and not settings.chat_template.is_file():
        text = f"CHAT_TEMPLATE={settings.chat_template} is not a file"
        yield Finding("problem", text, "name a Jinja file, or leave it out")
    if not machine.torch:
        yield Finding("problem", "the embedded engine needs PyTorch, which is not installed", _TORCH)
        return
    if role_of(settings).core == "visual":
        if lacking := [package for package in ("diffusers", "av") if not _installed(package)]:
            text = f"pictures and videos need {' and '.join(lacking)}, which is not installed"
            yield Finding("problem", text, "pip install 'trellis[visual]'")
        if on_gpu(settings, machine):
            yield from _gpu_problems(settings, machine)
        return
    weights, facts = weight_bytes(folder) if folder is not None else 0, None
    with suppress(EngineFailure):  # the engine says what is wrong with it
        facts = read_model_facts(folder) if folder is not None else None
        if folder is None and Path(settings.model).expanduser().is_file():
            weights, facts = _of_gguf(Path(settings.model).expanduser())
    if on_gpu(settings, machine):
        yield from _gpu_problems(settings, machine)
    else:
        yield from _cpu_problems(settings, machine, weights)
    yield from _tier_problems(settings, machine)
    yield from _sharing_problems(settings, on_gpu(settings, machine))
    if facts is not None and (sentence := too_long(settings, facts)):
        yield Finding("problem", sentence, f"MAX_SEQ_LEN={facts.context_length} at most, or 0 for the model's")


def _of_gguf(path: Path) -> tuple[int, ModelFacts]:
    """Return the size that the weights of a GGUF file will have, and its facts, before it is converted. Raises
    EngineFailure."""
    from engine.checkpoints.gguf.convert import check  # noqa: PLC0415 - imports numpy

    model = check(path)
    return 2 * model.file.weights, ModelFacts(model.settings(), folder=path)


def too_long(settings: Settings, facts: ModelFacts) -> str:
    """Return why the model cannot have the context that is asked for; empty if it can."""
    try:
        most = facts.context_length
    except EngineFailure:  # named differently: transformers knows it
        return ""
    if settings.max_seq_len <= most:
        return ""
    return f"MAX_SEQ_LEN={settings.max_seq_len} is longer than the model's context of {most} tokens"


def _gpu_problems(settings: Settings, machine: Machine) -> Iterator[Finding]:
    asked = re.fullmatch(r"cuda(?::(\d+))?", settings.device)
    index = int(asked[1] or 0) if asked else 0
    if machine.gpus is not None and not machine.gpus:
        text = f"DEVICE={settings.device}, but no NVIDIA GPU answers"
        cure = "DEVICE=cpu, or install NVIDIA's driver (nvidia-smi must list the GPU); in a container also --gpus all"
        if machine.hidden:
            text = f"DEVICE={settings.device}, but CUDA_VISIBLE_DEVICES shows none of {machine.hidden} GPUs"
            cure = "unset CUDA_VISIBLE_DEVICES, or DEVICE=cpu"
        yield Finding("problem", text, cure)
    elif machine.torch.endswith("+cpu"):
        text = f"DEVICE={settings.device}, but torch {machine.torch} is built without CUDA"
        yield Finding("problem", text, "install a build of torch with CUDA, or DEVICE=cpu")
    elif machine.gpus is None:  # the engine finds out
        return
    elif settings.quantization == "int8":
        text = f"QUANTIZATION=int8 is for a CPU, and DEVICE={settings.device} takes the GPU"
        yield Finding("problem", text, "QUANTIZATION=fp8 from compute capability 9.0 on, or DEVICE=cpu")
    elif index >= len(machine.gpus):
        text = f"DEVICE={settings.device}, but {len(machine.gpus)} GPUs are visible"
        yield Finding("problem", text, f"DEVICE=cuda:{len(machine.gpus) - 1} at most")
    elif needy := fast_path_settings(settings):
        gpu = machine.gpus[index]
        if gpu.capability < _FAST_PATH_CAPABILITY:
            text = f"{needy} needs compute capability {_FAST_PATH_CAPABILITY}, and {gpu.name} has {gpu.capability}"
            yield Finding("problem", text, "leave it out, or use a GPU of the Hopper generation or newer")
        elif not _installed("flashinfer-python"):
            text = f"{needy} needs FlashInfer, which is not installed"
            yield Finding("problem", text, "pip install 'trellis[gpu]'")


def _cpu_problems(settings: Settings, machine: Machine, weights: int) -> Iterator[Finding]:
    if needy := fast_path_settings(settings):
        text = f"{needy} needs an NVIDIA GPU of compute capability {_FAST_PATH_CAPABILITY}, and this runs on the CPU"
        yield Finding("problem", text, "leave it out")
    if settings.quantization == "int8" and (against := _not_compiled(settings)):
        text = f"QUANTIZATION=int8 needs the compiled path, which {against} rules out"
        yield Finding("problem", text, "leave one of them out")
    if settings.attention == "flashinfer":
        text = "ATTENTION=flashinfer needs an NVIDIA GPU, and this runs on the CPU"
        yield Finding("problem", text, "leave it out")
    if settings.load_format == "dummy":
        weights = 0
    cache = settings.kv_cache_memory_mb * MIB
    have = f"{machine.memory / GIB:.1f} GiB of memory"
    if cache > machine.memory:
        most = max(1, (machine.free - weights) // MIB)
        text = f"KV_CACHE_MEMORY_MB={settings.kv_cache_memory_mb} is more than this machine has: {have}"
        yield Finding("problem", text, f"KV_CACHE_MEMORY_MB={most} at most, or 0 to fit the machine")
    elif weights > machine.memory:
        text = f"the weights take {weights / GIB:.1f} GiB, and this machine has {have}"
        yield Finding("problem", text, "take a smaller model")
    elif weights + cache > machine.memory:
        asked = f"weights of {weights / GIB:.1f} GiB and KV_CACHE_MEMORY_MB={settings.kv_cache_memory_mb}"
        text = f"{asked} are more than this machine has: {have}"
        yield Finding("problem", text, "KV_CACHE_MEMORY_MB=0 to fit the machine, or a smaller model")


def _not_compiled(settings: Settings) -> str:
    """Return the settings that keep a CPU from its compiled path; empty if none does."""
    rules_out = {
        "ATTENTION": settings.attention == "sdpa",
        "DTYPE": settings.dtype not in ("auto", "float32"),
        "LOAD_FORMAT": settings.load_format == "dummy",
    }
    return " and ".join(f"{name}={getattr(settings, name.lower())}" for name, asked in rules_out.items() if asked)


def _sharing_problems(settings: Settings, gpu: bool) -> Iterator[Finding]:
    if gpu and settings.standby == "model" and settings.memory_service is None:
        text = "ENGINE_STANDBY=true needs MEMORY_SERVICE on a GPU, whose memory would hold the weights twice"
        yield Finding("problem", text, "start `trellis memory` and set MEMORY_SERVICE, or leave ENGINE_STANDBY out")
    if gpu and settings.standby == "model":
        moves = "DISAGGREGATION_MODE" if role_of(settings).moves_kv_blocks else ""
        if named := moves or ("SPECULATIVE" if settings.speculative in ("draft", "eagle3") else ""):
            text = f"ENGINE_STANDBY=true cannot be used on a GPU with {named}={getattr(settings, named.lower())}"
            yield Finding("problem", text, "leave one of them out")
    if settings.memory_service is None:
        return
    against = "ATTENTION=sdpa" if gpu and settings.attention == "sdpa" else ""
    if against or (not gpu and (against := _not_compiled(settings))):
        text = f"MEMORY_SERVICE shares the weights of compiled code, which {against} rules out"
        yield Finding("problem", text, "leave one of them out")


def _tier_problems(settings: Settings, machine: Machine) -> Iterator[Finding]:
    host, disk = settings.kv_host_cache_mb * MIB, settings.kv_disk_cache_mb * MIB
    cache = 0 if on_gpu(settings, machine) else settings.kv_cache_memory_mb * MIB
    if host and host + cache > machine.memory:
        asked = f"KV_HOST_CACHE_MB={settings.kv_host_cache_mb}"
        if cache:
            asked += f" and KV_CACHE_MEMORY_MB={settings.kv_cache_memory_mb}"
        text = f"{asked} are more than this machine has: {machine.memory / GIB:.1f} GiB of memory"
        yield Finding("problem", text, f"KV_HOST_CACHE_MB={max(0, machine.free - cache) // MIB} at most")
    if not disk:
        return
    folder = settings.kv_disk_cache_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free, whole, taken = _disk(folder)
    except OSError as error:
        text = f"KV_DISK_CACHE_DIR={folder} cannot be used: {error.strerror}"
        yield Finding("problem", text, "name a folder that this user can write to")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"KV_DISK_CACHE_DIR={folder} cannot be written to"
        yield Finding("problem", text, "name a folder that this user can write to")
    elif disk > whole:
        text = f"KV_DISK_CACHE_MB={settings.kv_disk_cache_mb} is more than the disk of {folder}: {whole / GIB:.1f} GiB"
        yield Finding("problem", text, f"KV_DISK_CACHE_MB={(free + taken) // MIB} at most")
    elif disk > free + taken:
        text = f"KV_DISK_CACHE_MB={settings.kv_disk_cache_mb} is more than is free in {folder}: {free / GIB:.1f} GiB"
        yield Finding("warning", text, f"KV_DISK_CACHE_MB={(free + taken) // MIB} at most, or make room")


def _disk(folder: Path) -> tuple[int, int, int]:
    """Return the bytes that are free on a folder's disk and those that it has, and the bytes of its files."""
    usage = shutil.disk_usage(folder)
    taken = sum(path.stat().st_size for path in folder.glob("*/*-*"))
    return usage.free, usage.total, taken


def _installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False
