"""Compile `decoder.cpp` for an instruction set, once for each cache folder, and give its functions to Python."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from blake3 import blake3

from engine.embedded.models.native.levels import Level
from engine.embedded.models.native.structures import NativeDrafting, NativeDraw, NativeModel, NativeStep

SOURCE = Path(__file__).with_name("decoder.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-std=gnu++20", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
_SECONDS = 120.0

log = logging.getLogger(__name__)


class NoCompilerError(Exception):
    """The code cannot be compiled here; the message says why."""


def first_compiled(folder: Path, levels: Iterable[Level]) -> Level:
    """Return the first level whose code is in `folder` or whose flags the compiler knows. Raises NoCompilerError."""
    *levels, last = levels
    for level in levels:
        if _path(folder, level).exists() or _knows(find_compiler(), level.flags):
            return level
        log.warning("%s does not know the instructions of CPU_ISA=%s", find_compiler(), level.name)
    return last


@cache
def library(folder: Path, level: Level) -> ctypes.CDLL:
    """Load the compiled code, which is kept in `folder`. Raises NoCompilerError."""
    path, flags = _path(folder, level), flags_of(level)
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _compile(path, flags)
        except OSError as error:
            raise NoCompilerError(f"the compiled code cannot be kept in {folder} ({error})") from error
    try:
        return _declared(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NoCompilerError(f"{path} cannot be loaded ({error})") from error


def find_compiler() -> str:
    """Return the command of a C++ compiler. Raises NoCompilerError."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoCompilerError(f"there is no C++ compiler ({', '.join(_COMPILERS)}); install g++")
    return compiler


def flags_of(level: Level) -> tuple[str, ...]:
    """Return the compiler's arguments, without names of files."""
    return *_FLAGS, *level.flags, f"-DLANES={level.lanes}", f"-DPRODUCTS={int(level.products)}"


def _path(folder: Path, level: Level) -> Path:
    return folder / f"decoder-{level.name}-{_fingerprint(flags_of(level))}.so"


@cache
def _knows(compiler: str, flags: tuple[str, ...]) -> bool:
    """Return whether a compiler compiles an empty file with these flags."""
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS).returncode == 0


def _compile(path: Path, flags: tuple[str, ...]) -> None:
    """Compile into a file of its own and move it into place: several processes may do this at once."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=path.parent) as part:
        made = Path(part) / path.name
        log.info("compiling the code for this processor with %s, once; that takes up to a minute", compiler)
        try:
            done = subprocess.run(
                [compiler, *flags, str(SOURCE), "-o", str(made)],
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise NoCompilerError(f"{compiler} took more than {_SECONDS:.0f} s") from error
        if done.returncode:
            raise NoCompilerError(f"{compiler} failed: {done.stderr.strip()[:1000]}")
        os.replace(made, path)


def _fingerprint(flags: tuple[str, ...]) -> str:
    sources = [SOURCE.read_bytes(), *(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.h")))]
    return blake3(repr((sources, flags, platform.machine())).encode()).hexdigest(8)


def _declared(code: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    code.all_finite.argtypes = [pointer, integer]
    code.pack.argtypes = [pointer, integer, integer, pointer, integer, integer]
    code.pack_blocks.argtypes = [integer, pointer, integer, integer, pointer, integer, integer]
    code.quantize.argtypes = [pointer, integer, integer, pointer]
    code.panel_bytes.argtypes, code.panel_bytes.restype = [integer, integer], integer
    code.draw_team_new.argtypes, code.draw_team_new.restype = [ctypes.c_int], pointer
    code.draw_team_delete.argtypes = [pointer]
    code.draw.argtypes = [pointer, pointer, integer, integer, ctypes.POINTER(NativeDraw), pointer]
    code.largest_ids.argtypes = [pointer, integer, integer, pointer]
    code.report.argtypes = [pointer, pointer, integer, integer, pointer, integer, pointer]
    code.decoder_new.argtypes, code.decoder_new.restype = [ctypes.POINTER(NativeModel), ctypes.c_int], pointer
    code.decoder_forward.argtypes = [pointer, ctypes.POINTER(NativeStep)]
    code.decoder_draft.argtypes = [pointer, ctypes.POINTER(NativeStep), ctypes.POINTER(NativeDrafting)]
    code.decoder_take.argtypes = [pointer, pointer, integer]
    code.decoder_threads.argtypes, code.decoder_threads.restype = [pointer], ctypes.c_int
    code.decoder_delete.argtypes = [pointer]
    decoder = (f"decoder_{name}" for name in ("forward", "draft", "take", "delete"))
    for name in ("pack", "pack_blocks", "draw_team_delete", "draw", "largest_ids", "report", *decoder):
        code[name].restype = None
    return code
