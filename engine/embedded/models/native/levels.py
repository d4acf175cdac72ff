"""Instruction sets that `decoder.cpp` is compiled for, and those that this processor has. No torch here: the command
line asks too."""

import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from engine.errors import EngineFailure

_CPUINFO = Path("/proc/cpuinfo")
_X86_64 = ("x86_64", "AMD64")


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


_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
LEVELS = (
    Level("portable", 4, (), frozenset()),
    Level("avx2", 8, ("-march=x86-64-v3",), _AVX2),
    Level("avx_vnni", 8, ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    Level("avx512", 16, ("-march=x86-64-v4",), _AVX2 | _AVX512),
    Level("avx512_vnni", 16, ("-march=x86-64-v4", "-mavx512vnni"), _AVX2 | _AVX512 | {"avx512_vnni"}),
)
"""Levels, slowest first.

VNNI levels multiply and accumulate pairs of integers in one instruction; their results are bit-identical to those of
the other levels. There is no level for AVX-512 BF16. Its dot products round activations to bfloat16; keeping float32
precision would take three such products, which are slower together than one float32 product.
"""


def available() -> tuple[Level, ...]:
    """Return the levels that this processor has, the fastest last."""
    features = _features()
    return tuple(level for level in LEVELS if level.needs <= features)


def chosen(name: str) -> Level:
    """Return the level of that name, or the fastest for `auto`. Raises EngineFailure for one that the processor
    lacks."""
    present = {level.name: level for level in available()}
    if name == "auto":
        return list(present.values())[-1]
    if name not in present:
        lacking = ", ".join(sorted(next(level.needs for level in LEVELS if level.name == name) - _features()))
        raise EngineFailure(
            f"CPU_ISA={name} cannot be used: this processor has {', '.join(present)} and lacks {lacking}"
        )
    return present[name]


@cache
def _features() -> frozenset[str]:
    """Return the processor features that the system lets programs use; empty except on x86-64 Linux."""
    if platform.machine() not in _X86_64 or not _CPUINFO.exists():
        return frozenset()
    return common_flags(_CPUINFO.read_text(errors="replace").splitlines())


def common_flags(lines: Iterable[str]) -> frozenset[str]:
    """Return the features that every core has."""
    cores = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    return frozenset.intersection(*cores) if cores else frozenset()
