"""Instruction sets that `decoder.cpp` is compiled for, and those that this processor has. No torch here: the command
line asks too."""

import ctypes
import platform
from collections.abc import Iterable
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from engine.errors import EngineFailure

_CPUINFO = Path("/proc/cpuinfo")
_X86_64 = ("x86_64", "AMD64")
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18
"""Numbers on x86-64 Linux: the system call arch_prctl, its request to use AMX, and the registers of AMX's tiles."""


class Arithmetic(IntEnum):
    """How weights in bfloat16 are multiplied: `Arithmetic` in `bfloat16.h`."""

    FLOATS = 0
    """With activations in float32."""
    PAIRS = 1
    """With activations rounded to bfloat16, added as VDPBF16PS adds."""
    TILES = 2
    """The same, added as AMX adds."""


class Level(NamedTuple):
    """One value of `CPU_ISA`."""

    name: str
    lanes: int
    """Number of floats in a vector."""
    flags: tuple[str, ...]
    """Compiler flags. They never name this machine's processor, so that a level computes the same results on every
    processor that supports it.
    """
    needs: frozenset[str]
    """Features that the processor must have, as Linux names them."""
    products: Arithmetic = Arithmetic.FLOATS

    def computes_in(self, dtype: str) -> bool:
        """Whether products of bfloat16 weights are as exact as that value of `DTYPE` asks for."""
        return dtype != "float32" or self.products == Arithmetic.FLOATS


_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16 = _VNNI | {"avx512_bf16"}
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
LEVELS = (
    Level("portable", 4, (), frozenset()),
    Level("avx2", 8, ("-march=x86-64-v3",), _AVX2),
    Level("avx_vnni", 8, ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    Level("avx512", 16, ("-march=x86-64-v4",), _AVX512),
    Level("avx512_bf16", 16, _BF16_FLAGS, _BF16, Arithmetic.PAIRS),
    Level("avx512_vnni", 16, _VNNI_FLAGS, _VNNI),
    Level("amx", 16, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), _BF16 | {"amx_tile", "amx_bf16"}, Arithmetic.TILES),
)
"""Levels, slowest first on Intel's processors.

VNNI levels multiply and accumulate integers in one instruction, and most activations that quantised weights are
multiplied with have 8 bits there, and 16 elsewhere (`blocks.h`). `avx512_bf16` and `amx` round activations to bfloat16,
unlike the others, so their logits are as far from those of float32 as other engines' in bfloat16. On Intel's processors
VDPBF16PS takes four times as long as a multiplication in float32 that does half as much; on AMD's it takes as long as
one, and `avx512_bf16` is faster than `avx512_vnni`.
"""


def available() -> tuple[Level, ...]:
    """Return the levels that this processor has, the fastest last."""
    features, fast_pairs = _features(), _vendor() == "AuthenticAMD"
    present = [level for level in LEVELS if level.needs <= features]
    return tuple(sorted(present, key=lambda level: (level.lanes, level.products)) if fast_pairs else present)


def chosen(name: str, dtype: str = "auto") -> list[Level]:
    """Return the level of that name, or for `auto` those that compute in `dtype`, the fastest first. Raises
    EngineFailure for one that the processor lacks, or that rounds activations although float32 was asked for."""
    present = {level.name: level for level in available()}
    if name == "auto":
        return [level for level in reversed(present.values()) if level.computes_in(dtype)]
    if name not in present:
        lacking = ", ".join(sorted(next(level.needs for level in LEVELS if level.name == name) - _features()))
        raise EngineFailure(
            f"CPU_ISA={name} cannot be used: this processor has {', '.join(present)} and lacks {lacking}"
        )
    if not present[name].computes_in(dtype):
        raise EngineFailure(f"CPU_ISA={name} rounds activations to bfloat16, and DTYPE={dtype} does not allow that")
    return [present[name]]


@cache
def _features() -> frozenset[str]:
    """Return the processor features that the system lets programs use; empty except on x86-64 Linux."""
    if platform.machine() not in _X86_64 or not _CPUINFO.exists():
        return frozenset()
    features = common_flags(_CPUINFO.read_text(errors="replace").splitlines())
    return features if "amx_tile" in features and _may_use_tiles() else features - {"amx_tile"}


@cache
def _vendor() -> str:
    """Return the processor's maker as Linux names it; empty except on x86-64 Linux."""
    if platform.machine() not in _X86_64 or not _CPUINFO.exists():
        return ""
    lines = _CPUINFO.read_text(errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _may_use_tiles() -> bool:
    """Ask the system to let this process use AMX, whose registers it saves only for processes that have asked."""
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA)) == 0


def common_flags(lines: Iterable[str]) -> frozenset[str]:
    """Return the features that every core has."""
    cores = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    return frozenset.intersection(*cores) if cores else frozenset()
