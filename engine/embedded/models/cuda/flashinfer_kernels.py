"""FlashInfer's kernels for attention of prompts, which are compiled when a machine first needs them: that takes more
than a minute, beside everything else. Until then the engine computes prompts in small steps, with kernels of its own.
"""

import logging
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import IO, Any

import torch
from filelock import FileLock

from engine.embedded.models.devices import UnsupportedModelError

_LAST_CHARACTERS = 2000
_END_SECONDS = 5.0
"""Time for ninja to end its compilers."""
_OTHER_MASK = re.compile(r"_mask_[023]\.cu$")
"""Sources of kernels for other masks than the causal one, in a library that FlashInfer compiles."""

log = logging.getLogger(__name__)


class FlashInferKernels:
    """Imports FlashInfer, and compiles and loads its kernels, in a thread of its own from `start` on."""

    def __init__(self, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> None:
        """`dtype` is that of queries, and of keys and values of a prompt's first step; `cache_dtype` that of the KV
        cache. Raises ImportError without FlashInfer."""
        if find_spec("flashinfer") is None:
            raise ImportError("flashinfer is not installed")
        self._device = device
        self._dtype = dtype
        self._kinds = list(dict.fromkeys((dtype, cache_dtype)))
        self._head_dim = head_dim
        self._error = ""
        self._done = threading.Event()
        self._compiling = threading.Lock()
        """Held while `_compilers` or `_closed` changes."""
        self._compilers: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Idempotent. Importing FlashInfer takes the interpreter for two seconds."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._load, name="flashinfer", daemon=True)
            self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether all kernels are loaded."""
        return self._done.is_set() and not self._error

    def wait(self) -> None:
        """Wait for the kernels, having begun if need be. Raises UnsupportedModelError if they cannot be compiled."""
        self.start()
        self._done.wait()
        if self._error:
            raise UnsupportedModelError(f"FlashInfer's kernels could not be compiled or loaded: {self._error}")

    def give_up(self, error: Exception) -> None:
        """Do without the kernels, as they cannot run."""
        self._error = f"{type(error).__name__}: {error}"
        log.error("FlashInfer's kernels cannot run, so prompts are computed in small steps: %s", self._error)

    def close(self) -> None:
        """End the compilers, which would work on for a minute."""
        with self._compiling:
            self._closed = True
            for compiler in self._compilers:
                _end(compiler)

    def _load(self) -> None:
        started = time.monotonic()
        try:
            # Slow to import, so this thread does it. Only `prefill` is part of FlashInfer's public interface, whose
            # wrappers call these functions, with these arguments, when a step is planned.
            from flashinfer import prefill  # noqa: PLC0415
            from flashinfer.jit import gen_batch_prefill_module  # noqa: PLC0415
            from flashinfer.utils import determine_attention_backend  # noqa: PLC0415

            def causal(*arguments: Any) -> Any:
                return _causal_alone(gen_batch_prefill_module(*arguments))

            kernels = []
            for kind in self._kinds:
                backend = determine_attention_backend(self._device, 0, False, False, self._dtype, kind)
                types = self._dtype, kind, self._dtype, torch.int32
                kernels.append((backend, *types, self._head_dim, self._head_dim, 0, False, False, False))
            try:
                compiled = self._open(prefill, kernels, causal)
            except _OpenError as error:
                log.info("FlashInfer's causal kernels alone cannot be loaded, so all are compiled: %s", error)
                compiled = self._open(prefill, kernels, gen_batch_prefill_module)
        except Exception as error:  # whatever a compiler, its files or the package run into
            self._error = f"{type(error).__name__}: {error}"
            if not self._closed:
                log.warning(
                    "FlashInfer's kernels could not be compiled or loaded, so prompts are computed in small steps, "
                    "which is slow; nvcc and ninja compile them: %s",
                    self._error,
                )
        else:
            if compiled:
                log.info("FlashInfer's kernels are compiled after %.1f s", time.monotonic() - started)
        finally:
            self._done.set()

    def _open(self, prefill: Any, kernels: Sequence[tuple[Any, ...]], made: Callable[..., Any]) -> bool:
        """Compile and load kernels, in libraries that `made` describes; return whether any were compiled. Raises
        RuntimeError, or _OpenError if they cannot be loaded."""
        if not hasattr(prefill, "gen_batch_prefill_module"):
            raise RuntimeError("this version of FlashInfer describes its libraries elsewhere")
        compiled = self._compile([made(*kernel) for kernel in kernels])
        prefill.gen_batch_prefill_module = made
        try:
            for kernel in kernels:
                prefill.get_batch_prefill_module(*kernel)
        except Exception as error:
            raise _OpenError(f"{type(error).__name__}: {error}") from error
        return compiled

    def _compile(self, libraries: Sequence[Any]) -> bool:
        """Compile libraries whose files are newer, as FlashInfer itself would, but at once; return whether there were
        any. Its own compilers would outlive this process. Raises RuntimeError."""
        begun: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        jobs = os.environ.get("MAX_JOBS", "")
        with ExitStack() as opened:
            for library in libraries:
                if library.is_aot:  # it is part of a package
                    continue
                opened.enter_context(FileLock(library.lock_path, thread_local=False))
                library.write_ninja()
                command = ["ninja", "-C", str(library.build_dir), "-f", str(library.ninja_path)]
                if jobs.isdigit():
                    command += ["-j", str(max(1, int(jobs) // len(libraries)))]
                if "no work to do" in subprocess.run([*command, "-n"], capture_output=True, text=True).stdout:
                    continue
                output: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())
                compiler = self._begin(command, output)
                opened.callback(_end, compiler)  # before its lock is released
                begun.append((compiler, output))
            for compiler, said in begun:
                if code := compiler.wait():
                    said.seek(0)
                    last = said.read().decode(errors="replace")[-_LAST_CHARACTERS:]
                    raise RuntimeError(f"ninja ended with code {code}: {last}")
        return bool(begun)

    def _begin(self, command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._compiling:
            if self._closed:
                raise RuntimeError("the engine is closed")
            compiler = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            self._compilers.append(compiler)
        return compiler


class _OpenError(Exception):
    """Libraries that have been compiled cannot be loaded."""


def _end(compiler: "subprocess.Popen[bytes]") -> None:
    compiler.terminate()  # ninja's compilers are groups of their own, which it ends on this signal
    try:
        compiler.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        compiler.kill()


def _causal_alone(library: Any) -> Any:
    """Have one of FlashInfer's libraries (a `JitSpec`) compiled for causal attention alone, under a name of its own.

    That leaves out six of ten files, of which each takes a minute. What is left refers to their functions still. The
    linker looks for a function when it is called, if nothing tells it otherwise (LD_BIND_NOW), and these never are, as
    all attention of prompts is causal.
    """
    if not library.is_aot:  # part of a package, and compiled
        library.name += "_causal"
        library.sources = [source for source in library.sources if not _OTHER_MASK.search(source.name)]
        library.extra_ldflags = [*(library.extra_ldflags or ()), "-Wl,-z,lazy"]
    return library
