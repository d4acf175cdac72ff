"""Compilation of Triton's kernels: side by side before an engine serves, with a warning if a request waits for it."""

# mypy: ignore-errors

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import triton
from triton.runtime.jit import JITFunction

_THREADS = 16

log = logging.getLogger(__name__)


def expect_compilation() -> None:
    """Let kernels be compiled without a warning: no request waits for a start."""
    triton.knobs.runtime.jit_post_compile_hook = None


def is_bare() -> bool:
    """Return whether this machine has compiled no kernel yet."""
    try:
        return not os.listdir(triton.knobs.cache.dir)
    except OSError:
        return True


def warn_of_compilation() -> None:
    """Log a warning for each kernel that is compiled from now on, with what it is compiled for."""
    triton.knobs.runtime.jit_post_compile_hook = _warn


def compile_first(compute: Callable[[], object]) -> None:
    """Compile the kernels of a computation side by side, without running them: what it computes means nothing.

    A compiler works for a second on each, on one core, and a first start needs dozens.
    """
    launch = JITFunction.run

    def compile_alone(kernel, *args, grid, warmup, **options):
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "triton") as pool, triton.AsyncCompileMode(pool):
        JITFunction.run = compile_alone
        try:
            compute()
        finally:
            JITFunction.run = launch


def _warn(*, key, fn, **_) -> None:
    log.warning("a request waited for kernel %s to be compiled for %s", fn.name, key)
