"""When Triton compiles: all kernels at once at the start, and a warning for each that a request has to wait for."""

# mypy: ignore-errors

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.runtime.jit import JITFunction

log = logging.getLogger(__name__)

_MAX_THREADS = 16


def compile_together(compute: Callable[[], object]) -> None:
    """Compile and load all kernels that `compute` launches, in several threads. They do not run: what `compute` returns
    has no meaning, and no memory may be addressed by it.

    One kernel takes about a second, most of it in programs that Triton starts. A failure here costs time alone: the
    first launch compiles again.
    """
    triton.knobs.runtime.jit_post_compile_hook = None  # no request waits for a start
    device, found = torch.cuda.current_device(), []
    run = JITFunction.run

    def compiled(function, *args, grid, warmup, **options):
        found.append(run(function, *args, grid=grid, warmup=True, **options))

    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        try:
            JITFunction.run = compiled
            try:
                with triton.AsyncCompileMode(pool, ignore_errors=True):
                    compute()
            finally:
                JITFunction.run = run
            kernels = {id(kernel): kernel for kernel in map(_result, found)}
            list(pool.map(_loaded, kernels.values()))
        except Exception:
            log.warning("kernels are compiled one after the other", exc_info=True)


def warn_of_compilation() -> None:
    """Log a warning for each kernel that is compiled from now on, with what it is compiled for."""
    triton.knobs.runtime.jit_post_compile_hook = _warn


def _result(kernel):
    return kernel.result() if hasattr(kernel, "result") else kernel


def _loaded(kernel) -> None:
    """Have the kernel's launcher compiled, which a C compiler does, and the kernel loaded."""
    _ = kernel.run


def _warn(*, key, fn, **_) -> None:
    log.warning("a request waited for kernel %s to be compiled for %s", fn.name, key)
