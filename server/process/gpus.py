"""The GPUs of this node, as the driver and CUDA_VISIBLE_DEVICES show them, and whether a replica's ranks fit. CUDA is
not initialized.
"""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.compose.engine_args import Parallelism  # and the arguments of TensorRT-LLM, of which most know nothing

_QUERY = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,compute_cap,memory.total,uuid",
    "--format=csv,noheader,nounits",
)
_QUERY_SECONDS = 30.0
_DRIVER = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia"))
"""Files of which one exists if NVIDIA's driver is loaded."""


@dataclass(frozen=True)
class Gpu:
    """`memory` in bytes, 0 where the driver does not tell (unified memory, a part of a GPU)."""

    name: str
    driver: str
    capability: float
    memory: int
    uuid: str = ""


def nvidia_smi() -> str | None:
    """Return the driver's description of its GPUs, one line each; None if no driver answers."""
    try:
        result = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


def driver_is_loaded() -> bool:
    """Return whether NVIDIA's driver is loaded, even if it does not answer."""
    return any(path.exists() for path in _DRIVER)


def parse_gpus(text: str | None) -> tuple[Gpu, ...]:
    """Parse the output of `nvidia-smi`. Lines of another form, such as errors, are skipped."""
    gpus = []
    for line in (text or "").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and re.match(r"\d", parts[1]) and re.fullmatch(r"\d+\.\d+", parts[2]):
            memory = int(parts[3]) * 1024**2 if parts[3].isdigit() else 0
            gpus.append(Gpu(parts[0], parts[1], float(parts[2]), memory, parts[4]))
    return tuple(gpus)


def hides_all(devices: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES shows no GPU, whatever there is."""
    return devices is not None and re.match(r"\s*(\d|GPU-|MIG-)", devices) is None


def visible(gpus: Sequence[Gpu], devices: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows: numbers, prefixes of UUIDs or MIG devices, up to the first
    invalid entry.
    """
    if devices is None or not gpus:
        return tuple(gpus)
    shown = []
    for device in map(str.strip, devices.split(",")):
        if device.startswith("MIG-"):
            named = [Gpu("part of a GPU", gpus[0].driver, gpus[0].capability, 0, device)]
        elif device.startswith("GPU-"):
            named = [gpu for gpu in gpus if gpu.uuid.startswith(device)]
        else:
            named = [gpu for number, gpu in enumerate(gpus) if device == str(number)]
        if len(named) != 1:
            break
        shown += named
    return tuple(shown)


def shortage(gpus: int, needs: "Parallelism") -> tuple[str, str] | None:
    """Return why the ranks do not fit on the `gpus` of this node, and the cure; None if they fit, here or together with
    other nodes.
    """
    if needs.per_node > gpus:
        return f"gpus_per_node is {needs.per_node}, {gpus} GPU(s) are visible", f"set GPUS_PER_NODE to {gpus} at most"
    if needs.ranks <= (needs.per_node or gpus) or needs.per_node:
        return None
    text = f"{needs.said} needs {needs.ranks} GPU(s), {gpus} are visible"
    if not gpus:
        return text, "nvidia-smi must list them and CUDA_VISIBLE_DEVICES show them"
    return text, f"ask for {gpus} in all, or set GPUS_PER_NODE and start on several nodes"
